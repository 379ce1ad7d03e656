#include "bindings/registration.h"

namespace pagedllm {

std::string& signatures() {
  static std::string text;
  return text;
}

}  // namespace pagedllm

// Read by pagedllm/ops/library.py.
extern "C" __attribute__((visibility("default"))) const char* pagedllm_signatures() {
  return pagedllm::signatures().c_str();
}
