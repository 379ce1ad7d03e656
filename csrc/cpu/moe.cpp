#include "cpu/moe.h"

#include <algorithm>

#include "cpu/linear.h"
#include "cpu/vector_math.h"

namespace pagedllm {
namespace {

// The largest `num_chosen` logits, of equal ones the first, then ordered by expert; with their shares of the softmax.
void choose_experts(const RouteTokensParams& p, const float* logits, int32_t* chosen, float* weights) {
  int64_t count = 0;
  for (int64_t expert = 0; expert < p.num_experts; ++expert) {
    int64_t place = count;  // what is chosen so far falls
    while (place > 0 && logits[expert] > logits[chosen[place - 1]]) --place;
    if (place == p.num_chosen) continue;
    count = std::min(count + 1, p.num_chosen);
    for (int64_t later = count - 1; later > place; --later) chosen[later] = chosen[later - 1];
    chosen[place] = static_cast<int32_t>(expert);
  }
  const f32x16 most = f32x16::broadcast(logits[chosen[0]]);
  f32x16 sums = f32x16::zero();
  for (int64_t i = 0; i < p.num_experts; i += 16) {
    const int64_t rest = p.num_experts - i;
    sums = sums + select_first(rest, exp(load_partial(logits + i, rest) - most), f32x16::zero());
  }
  float total = reduce_add(sums);
  std::sort(chosen, chosen + p.num_chosen);
  for (int64_t i = 0; i < p.num_chosen; ++i) weights[i] = logits[chosen[i]];
  float chosen_total = 0;
  for (int64_t i = 0; i < p.num_chosen; i += 16) {
    const int64_t rest = p.num_chosen - i;
    store_partial(weights + i, exp(load_partial(weights + i, rest) - most), rest);
  }
  for (int64_t i = 0; i < p.num_chosen; ++i) chosen_total += weights[i];
  if (p.is_normalized) total = chosen_total;
  for (int64_t i = 0; i < p.num_chosen; ++i) weights[i] /= total;
}

}  // namespace

void route_tokens(const RouteTokensParams& p) {
  // `places` holds experts until all are known
  p.parallel.ranges(p.num_tokens, 16 * p.num_experts, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      choose_experts(p, p.logits + token * p.logits_stride, p.places + token * p.num_chosen,
                     p.weights + token * p.num_chosen);
    }
  });
  const int64_t num_places = p.num_tokens * p.num_chosen;
  std::fill(p.bounds, p.bounds + p.num_experts + 1, 0);
  for (int64_t i = 0; i < num_places; ++i) ++p.bounds[p.places[i] + 1];
  for (int64_t expert = 0; expert < p.num_experts; ++expert) p.bounds[expert + 1] += p.bounds[expert];
  for (int64_t i = 0; i < num_places; ++i) {
    p.places[i] = p.bounds[p.places[i]]++;
    p.tokens[p.places[i]] = static_cast<int32_t>(i / p.num_chosen);
  }
  // each bound has moved to the next one's place
  for (int64_t expert = p.num_experts; expert > 0; --expert) p.bounds[expert] = p.bounds[expert - 1];
  p.bounds[0] = 0;
}

template <class T>
void grouped_linear(const GroupedLinearParams<T>& p) {
  const int64_t padded_k = (p.k + kPairing<T> - 1) / kPairing<T> * kPairing<T>;
  int64_t num_active = 0;
  for (int64_t expert = 0; expert < p.num_experts; ++expert) num_active += p.bounds[expert] < p.bounds[expert + 1];
  // Where few rows leave the pace to memory, a task reads a whole expert; else tasks are small, so that none is last.
  const int64_t num_threads = p.parallel.num_threads(), num_rows = p.bounds[p.num_experts];
  const int64_t wanted_runs = num_rows < 2 * num_active ? num_threads : 16 * num_threads;
  const int64_t run = std::clamp<int64_t>(num_active * p.num_panels / wanted_runs, 1, p.num_panels);
  const int64_t runs = (p.num_panels + run - 1) / run;
  p.parallel(p.num_experts * runs, [&](int64_t task) {
    const int64_t expert = task / runs, first_panel = task % runs * run;
    const int64_t first_row = p.bounds[expert], rows = p.bounds[expert + 1] - first_row;
    if (rows == 0) return;
    PackedLinearParams<T, T> own{};
    own.out = p.out + first_row * p.out_stride;
    own.x = p.x + first_row * p.x_stride;
    own.weight = p.weights + expert * p.num_panels * kPanel * padded_k;
    own.bias = p.biases ? p.biases + expert * p.num_panels * kPanel : nullptr;
    own.out_stride = p.out_stride;
    own.x_stride = p.x_stride;
    own.num_rows = rows;
    own.k = p.k;
    own.num_columns = p.num_columns;
    own.num_panels = p.num_panels;
    own.activation = p.activation;
    const int64_t end_panel = std::min(first_panel + run, p.num_panels);
    multiply_panels(own, first_panel, end_panel, 0, rows, end_panel);
  });
}

template <class T>
void combine_experts(const CombineExpertsParams<T>& p) {
  const int64_t cost = (p.num_chosen + 2) * p.hidden_size * static_cast<int64_t>(sizeof(T));
  p.parallel.ranges(p.num_tokens, cost, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int32_t* places = p.places + token * p.num_chosen;
      const float* weights = p.weights + token * p.num_chosen;
      f32x16 share = f32x16::zero();
      if (p.shared) {
        const f32x16 one = f32x16::broadcast(1.0f);
        share = one / (one + exp(f32x16::broadcast(-p.shared_gates[token])));
      }
      for (int64_t i = 0; i < p.hidden_size; i += 16) {
        const int64_t rest = p.hidden_size - i;
        f32x16 sum = f32x16::zero();
        for (int64_t choice = 0; choice < p.num_chosen; ++choice) {
          sum = fma(load_partial(p.rows + places[choice] * p.rows_stride + i, rest), f32x16::broadcast(weights[choice]),
                    sum);
        }
        if (p.shared) sum = fma(load_partial(p.shared + token * p.shared_stride + i, rest), share, sum);
        if (p.residual) sum = sum + load_partial(p.residual + token * p.residual_stride + i, rest);
        store_partial(p.out + token * p.out_stride + i, sum, rest);
      }
    }
  });
}

template void grouped_linear(const GroupedLinearParams<bf16>&);
template void grouped_linear(const GroupedLinearParams<float>&);
template void combine_experts(const CombineExpertsParams<bf16>&);
template void combine_experts(const CombineExpertsParams<float>&);

}  // namespace pagedllm
