#include "cpu/sampling.h"

#include <cmath>
#include <cstring>

#include "cpu/sampling_row.h"
#include "cpu/vector_math.h"

namespace pagedllm {
namespace {

// ---- the draw

// 64 random bits: Philox 4x32-10 of Salmon et al., 2011.
uint64_t random_bits(uint64_t seed, uint32_t sample_index, uint32_t output_position) {
  uint32_t c[4] = {output_position, sample_index, 0, 0};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
    c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0;
    c[1] = static_cast<uint32_t>(p1);
    c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1;
    c[3] = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return uint64_t{c[1]} << 32 | c[0];
}

// Fixed-point weights of logits, 0 .. 2^32; what is below `smallest` counts nothing (min_p).
class Weights {
 public:
  Weights(float max, float temperature, float min_p)
      : max_(max),
        scale_(static_cast<float>(
            std::min(1.4426950408889634 / temperature, static_cast<double>(std::numeric_limits<float>::max())))),
        smallest_(static_cast<uint64_t>(std::ceil(static_cast<double>(min_p) * 4294967296.0))) {}

  // Of count <= kBlock logits; `weights` has room for kBlock, and the rest of it is 0.
  void compute(const float* logits, int64_t count, uint64_t* weights) const {
    float mantissa[kBlock] = {}, exponent[kBlock] = {};
    for (int64_t first = 0; first < count; first += kGroups) {
      split(load_partial(logits + first, count - first), count - first, mantissa + first, exponent + first);
    }
    // round(mantissa * 2^(9 - shift)), half up; in 32 bits, where 2^32 alone becomes 0
    uint32_t low[kBlock], carry[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) {
      const auto m = static_cast<uint32_t>(static_cast<int32_t>(mantissa[i]));
      const int32_t shift = -static_cast<int32_t>(exponent[i]);
      const int32_t left = 9 - shift > 0 ? 9 - shift : 0, right = shift - 9 > 0 ? shift - 9 : 0;
      low[i] = ((m << left) + ((uint32_t{1} << right) >> 1)) >> right;
      carry[i] = m != 0 && low[i] == 0 ? 1 : 0;
    }
    for (int64_t i = 0; i < kBlock; ++i) {
      const uint64_t weight = uint64_t{carry[i]} << 32 | low[i];
      weights[i] = weight < smallest_ ? 0 : weight;
    }
  }

  // Logits below this weigh nothing, whatever the rounding of `compute`.
  float lowest() const {
    const double bound = static_cast<double>(max_) - 33.0 / scale_ * 1.00001;
    const float lowest = std::nextafter(static_cast<float>(bound), -kInfinity);
    return std::max(lowest, std::numeric_limits<float>::lowest());
  }

 private:
  // exp2 of the scaled distance to the maximum, as mantissa * 2^(exponent - 23). The twin's order of operations, so
  // that bits are equal; where the weight is zero, 0 * 2^-34.
  void split(f32x16 logits, int64_t count, float* mantissa, float* exponent) const {
    constexpr float kCoefficients[] = {0.6931471824645996f,   0.24022722244262695f,   0.055495936423540115f,
                                       0.009652440436184406f, 0.0012689352734014392f, 0.00020829190907534212f};
    const f32x16 one = f32x16::broadcast(1.0f), limit = f32x16::broadcast(-33.0f);
    const f32x16 distance = (logits - f32x16::broadcast(max_)) * f32x16::broadcast(scale_);
    const f32x16 x = select_less(distance, limit, f32x16::broadcast(-34.0f), distance);
    const f32x16 nearest = round(x);
    const f32x16 floor = select_less(x, nearest, nearest - one, nearest);
    const f32x16 f = x - floor;
    f32x16 p = f32x16::broadcast(kCoefficients[5]);
    for (int i = 4; i >= 0; --i) p = p * f + f32x16::broadcast(kCoefficients[i]);
    const f32x16 scaled = (p * f + one) * f32x16::broadcast(8388608.0f);  // an integer: p is in 1 .. 2
    store_partial(mantissa, select_less(distance, limit, f32x16::zero(), scaled), count);
    store_partial(exponent, floor, count);
  }

  float max_, scale_;
  uint64_t smallest_;
};

// floor(random * sum / 2^64): below the sum, in proportion.
uint64_t threshold_of(uint64_t random, uint64_t sum) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(random) * sum >> 64);
}

// A row's weights summed by block: enough to draw when no order among tokens is needed.
class BlockSums {
 public:
  BlockSums(const LogitsRow& row, const Weights& weights)
      : row_(row), weights_(weights), sums_(static_cast<size_t>(row.num_blocks())) {
    const float lowest = weights.lowest();
    uint64_t block[kBlock];
    for (int64_t b = 0; b < row.num_blocks(); ++b) {
      if (row.block_max(b) < lowest) continue;
      weights.compute(row.block(b), row.block_size(b), block);
      uint64_t sum = 0;
      for (int64_t i = 0; i < row.block_size(b); ++i) sum += block[i];
      sums_[static_cast<size_t>(b)] = sum;
      total_ += sum;
    }
  }

  uint64_t total() const { return total_; }

  // The first id whose inclusive sum exceeds the threshold.
  int32_t find(uint64_t threshold) const {
    int64_t b = 0;
    for (; threshold >= sums_[static_cast<size_t>(b)]; ++b) threshold -= sums_[static_cast<size_t>(b)];
    uint64_t block[kBlock];
    weights_.compute(row_.block(b), row_.block_size(b), block);
    int64_t i = 0;
    for (; threshold >= block[i]; ++i) threshold -= block[i];
    return static_cast<int32_t>(b * kBlock + i);
  }

 private:
  const LogitsRow& row_;
  const Weights& weights_;
  std::vector<uint64_t> sums_;
  uint64_t total_ = 0;
};

// Larger logits have larger keys; -0 and 0 have the same.
uint32_t key_of(float logit) {
  logit += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &logit, sizeof(bits));
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

struct Candidate {
  int32_t id;
  uint32_t key;
  uint64_t weight;
};

// Tokens in order of ids, thinned out by top_k and top_p.
class Candidates {
 public:
  // All tokens whose logit is not below `bound`.
  Candidates(const LogitsRow& row, const Weights& weights, float bound) {
    float logits[kBlock];
    uint64_t block[kBlock];
    int64_t count = 0;
    const auto flush = [&] {
      weights.compute(logits, count, block);
      for (int64_t i = 0; i < count; ++i) tokens_[tokens_.size() - static_cast<size_t>(count - i)].weight = block[i];
      count = 0;
    };
    row.for_each_from(bound, [&](int32_t id, float logit) {
      tokens_.push_back({id, key_of(logit), 0});
      logits[count++] = logit;
      if (count == kBlock) flush();
    });
    flush();
  }

  uint64_t total() const {
    uint64_t sum = 0;
    for (const Candidate& token : tokens_) sum += token.weight;
    return sum;
  }

  // Keeps the first k in order (key descending, id ascending).
  void keep_first(uint64_t k) {
    if (k >= tokens_.size()) return;
    const auto one = [](const Candidate&) { return uint64_t{1}; };
    const Pivot pivot = find_pivot(k, one);
    keep(pivot.key, k - pivot.above);
  }

  // Keeps the shortest run in order whose weight reaches `target`, which is in 1 .. total().
  void keep_weight(uint64_t target) {
    const Pivot pivot = find_pivot(target, [](const Candidate& token) { return token.weight; });
    // what ties at the pivot has one weight
    uint64_t weight = 0;
    for (const Candidate& token : tokens_) weight = token.key == pivot.key ? token.weight : weight;
    keep(pivot.key, (target - pivot.above + weight - 1) / weight);
  }

  // The first id whose inclusive sum exceeds the threshold.
  int32_t find(uint64_t threshold) const {
    auto token = tokens_.begin();
    for (; threshold >= token->weight; ++token) threshold -= token->weight;
    return token->id;
  }

 private:
  struct Pivot {
    uint32_t key;
    uint64_t above;  // measure of what has a larger key
  };
  struct Entry {
    uint32_t key;
    uint64_t measure;
  };

  // The largest key such that the measures from it upwards reach `target`. Radix selection: histograms of ever
  // narrower ranges of keys.
  template <class Measure>
  Pivot find_pivot(uint64_t target, const Measure& measure) const {
    constexpr int kBits = 8;
    std::vector<Entry> entries(tokens_.size());
    uint32_t low = ~uint32_t{0}, high = 0;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      entries[i] = {tokens_[i].key, measure(tokens_[i])};
      low = std::min(low, entries[i].key);
      high = std::max(high, entries[i].key);
    }
    uint64_t above = 0;
    while (low < high) {
      int shift = 0;
      while ((high - low) >> shift >> kBits) ++shift;
      uint64_t histogram[1 << kBits] = {};
      for (const Entry& entry : entries) histogram[(entry.key - low) >> shift] += entry.measure;
      uint32_t bucket = (high - low) >> shift;
      while (above + histogram[bucket] < target) above += histogram[bucket--];
      low += bucket << shift;
      high = std::min(high, low + ((uint32_t{1} << shift) - 1));
      entries.erase(std::remove_if(entries.begin(), entries.end(),
                                   [=](const Entry& entry) { return entry.key < low || entry.key > high; }),
                    entries.end());
    }
    return {low, above};
  }

  // Keeps larger keys, and the first `num_ties` that equal it.
  void keep(uint32_t key, uint64_t num_ties) {
    const auto is_out = [&](const Candidate& token) {
      if (token.key != key) return token.key < key;
      if (num_ties == 0) return true;
      --num_ties;
      return false;
    };
    size_t kept = 0;  // std::remove_if may copy its predicate, and this one counts
    for (const Candidate& token : tokens_) {
      if (!is_out(token)) tokens_[kept++] = token;
    }
    tokens_.resize(kept);
  }

  std::vector<Candidate> tokens_;
};

uint64_t top_p_target(float top_p, uint64_t total) {
  const auto target = static_cast<uint64_t>(std::ceil(static_cast<double>(top_p) * static_cast<double>(total)));
  return std::max<uint64_t>(target, 1);
}

int32_t draw_from_top_k(const LogitsRow& row, const Weights& weights, int64_t top_k, float top_p, uint64_t random) {
  Candidates candidates(row, weights, row.bound(top_k, weights.lowest()));
  candidates.keep_first(static_cast<uint64_t>(top_k));
  if (top_p < 1.0f) candidates.keep_weight(top_p_target(top_p, candidates.total()));
  return candidates.find(threshold_of(random, candidates.total()));
}

// The run that top_p keeps is mostly short: look among a few hundred tokens first.
int32_t draw_from_top_p(const LogitsRow& row, const Weights& weights, float top_p, uint64_t random) {
  const uint64_t target = top_p_target(top_p, BlockSums(row, weights).total());
  const float lowest = weights.lowest();
  for (int64_t count = 256;; count *= 4) {
    const float bound = row.bound(count, lowest);
    Candidates candidates(row, weights, bound);
    if (bound > lowest && candidates.total() < target) continue;
    candidates.keep_weight(target);
    return candidates.find(threshold_of(random, candidates.total()));
  }
}

int32_t sample_row(const SampleParams& p, int64_t index) {
  const LogitsRow row(p.logits + index * p.logits_stride, p.vocab_size);
  if (!row.is_finite()) return -1;
  if (p.temperature[index] == 0.0f) return row.argmax();
  const Weights weights(row.max(), p.temperature[index], p.min_p[index]);
  const int32_t* counter = p.counter + 2 * index;
  const uint64_t random = random_bits(static_cast<uint64_t>(p.seed[index]), static_cast<uint32_t>(counter[0]),
                                      static_cast<uint32_t>(counter[1]));
  const int32_t top_k = p.top_k[index];
  const float top_p = p.top_p[index];
  if (top_k > 0 && top_k < p.vocab_size) return draw_from_top_k(row, weights, top_k, top_p, random);
  if (top_p < 1.0f) return draw_from_top_p(row, weights, top_p, random);
  const BlockSums sums(row, weights);
  return sums.find(threshold_of(random, sums.total()));
}

// ---- edits of logits

void mask_row(float* logits, const int32_t* bitmask, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const bool is_allowed = static_cast<uint32_t>(bitmask[i / 32]) >> (i % 32) & 1;
    logits[i] = is_allowed ? logits[i] : -kInfinity;
  }
}

void process_row(const ProcessLogitsParams& p, int64_t index) {
  float* logits = p.logits + index * p.logits_stride;
  if (p.bitmask) mask_row(logits, p.bitmask + index * ((p.vocab_size + 31) / 32), p.vocab_size);
  if (p.bias_offsets) {
    for (int32_t n = p.bias_offsets[index]; n < p.bias_offsets[index + 1]; ++n) {
      logits[p.bias_ids[n]] += p.bias_values[n];
    }
  }
  if (p.penalties) {
    const float repetition = p.penalties[3 * index], presence = p.penalties[3 * index + 1];
    const float frequency = p.penalties[3 * index + 2];
    for (int32_t n = p.penalty_offsets[index]; n < p.penalty_offsets[index + 1]; ++n) {
      float& z = logits[p.penalty_ids[n]];
      const auto count = static_cast<float>(p.penalty_counts[n]);
      z = z > 0.0f ? z / repetition : z * repetition;
      z = z - frequency * count - (p.penalty_counts[n] > 0 ? presence : 0.0f);
    }
  }
}

// ---- logprobs

// log(sum(exp(z - max))), added up in a fixed order.
double log_sum_exp(const LogitsRow& row) {
  double sum = 0.0;
  for (int64_t b = 0; b < row.num_blocks(); ++b) {
    f32x16 lanes = f32x16::zero();
    const float* z = row.block(b);
    for (int64_t left = row.block_size(b); left > 0; left -= kGroups, z += kGroups) {
      const f32x16 value = exp(load_partial(z, left) - f32x16::broadcast(row.max()));
      lanes = lanes + select_first(left, value, f32x16::zero());
    }
    sum += reduce_add(lanes);
  }
  return std::log(sum);
}

void find_top(const LogitsRow& row, int64_t k, int32_t* top_ids) {
  const bool is_finite = row.is_finite();
  const float bound = is_finite ? row.bound(k, -kInfinity) : -kInfinity;
  std::vector<uint64_t> order;  // ascending: key descending, id ascending; NaN before all
  row.for_each_from(bound, [&](int32_t id, float logit) {
    const uint32_t key = logit != logit ? ~uint32_t{0} : key_of(logit);
    order.push_back(uint64_t{~key} << 32 | static_cast<uint32_t>(id));
  });
  const auto end = order.begin() + k;
  if (end != order.end()) std::nth_element(order.begin(), end, order.end());
  std::sort(order.begin(), end);
  for (int64_t i = 0; i < k; ++i) top_ids[i] = static_cast<int32_t>(order[static_cast<size_t>(i)]);
}

void logprobs_row(const TopLogprobsParams& p, int64_t index) {
  const LogitsRow row(p.logits + index * p.logits_stride, p.vocab_size);
  const double log_sum = log_sum_exp(row);
  const auto logprob = [&](int32_t id) {
    return row.is_finite() ? static_cast<float>(static_cast<double>(row[id]) - row.max() - log_sum) : NAN;
  };
  int32_t* top_ids = p.top_ids + index * p.k;
  if (p.k > 0) find_top(row, p.k, top_ids);
  for (int64_t i = 0; i < p.k; ++i) p.top_values[index * p.k + i] = logprob(top_ids[i]);

  const int32_t token = p.token_ids[index];
  p.token_values[index] = token < 0 ? NAN : logprob(token);
  int32_t rank = token < 0 ? 0 : 1;
  if (token >= 0) {
    for (int64_t i = 0; i < p.vocab_size; ++i) rank += row[i] > row[token];
  }
  p.token_ranks[index] = rank;
}

}  // namespace

void process_logits(const ProcessLogitsParams& params) {
  params.parallel(params.num_rows, [&](int64_t row) { process_row(params, row); });
}

void sample(const SampleParams& params) {
  params.parallel(params.num_rows, [&](int64_t row) { params.token_ids[row] = sample_row(params, row); });
}

void top_logprobs(const TopLogprobsParams& params) {
  params.parallel(params.num_rows, [&](int64_t row) { logprobs_row(params, row); });
}

}  // namespace pagedllm
