// The packed layout of weights; pagedllm/ops/linear.py draws it.
#pragma once
#include "cpu/types.h"

namespace pagedllm {

constexpr int kPanel = 64;              // columns of a panel
constexpr int kGatedHalf = kPanel / 2;  // of which, in a gated product, so many are gates, and as many ups

// As in pagedllm.ops.linear.Activation.
enum class Activation : int { kNone = 0, kSilu = 1, kGeluTanh = 2, kGelu = 3, kClampedSwish = 4 };

// Elements of a column that lie together, along K: bf16 pairs.
template <class T>
constexpr int kPairing = sizeof(T) == sizeof(float) ? 1 : 2;

}  // namespace pagedllm
