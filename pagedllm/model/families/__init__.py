"""One file a family: translates a checkpoint's config and tensor names to our decoder."""
