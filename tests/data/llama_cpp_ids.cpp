// Prints the ids that llama.cpp gives to strings, one line a string: llama_cpp_ids MODEL.gguf < strings, each ended by NUL.
// Build: g++ -O1 -I llama.cpp/include -I llama.cpp/ggml/include llama_cpp_ids.cpp -L BUILD/bin -lllama -lggml -lggml-base
#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "llama.h"

int main(int, char** argv) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  llama_model_params params = llama_model_default_params();
  params.vocab_only = true;
  llama_model* model = llama_model_load_from_file(argv[1], params);
  if (!model) {
    std::fprintf(stderr, "%s cannot be loaded\n", argv[1]);
    return 1;
  }
  const llama_vocab* vocab = llama_model_get_vocab(model);
  const std::string input((std::istreambuf_iterator<char>(std::cin)), {});
  for (size_t start = 0; start < input.size();) {
    const size_t end = input.find('\0', start);
    std::vector<llama_token> ids(2 * (end - start) + 16);
    const int count = llama_tokenize(vocab, input.data() + start, end - start, ids.data(), ids.size(),
                                     /*add_special=*/true, /*parse_special=*/true);
    for (int i = 0; i < count; ++i) std::printf("%d ", ids[i]);
    std::printf("\n");
    start = end + 1;
  }
}
