"""Files of prompts: formats, running them, reporting."""
