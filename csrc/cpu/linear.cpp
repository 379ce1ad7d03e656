#include "cpu/linear.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/activation.h"
#include "cpu/logits.h"
#include "cpu/simd.h"

namespace pagedllm {
namespace {

// A tile of the result stays in registers while K runs: `rows` rows by `vectors` times 16 columns. 24 of AVX-512's 32
// registers accumulate; where bf16 pairs are widened first, the widened values take their part.
template <class T>
struct TileShape {
#if defined(PAGEDLLM_ISA_AVX512_BF16)
  static constexpr int kRows = 6, kVectors = 4;
#elif defined(PAGEDLLM_ISA_AVX512)
  static constexpr int kRows = 6, kVectors = sizeof(T) == sizeof(float) ? 4 : 2;
#elif defined(PAGEDLLM_ISA_AVX2)
  static constexpr int kRows = sizeof(T) == sizeof(float) ? 6 : 4, kVectors = 1;
#else
  static constexpr int kRows = 2, kVectors = 1;
#endif
  // Few rows leave accumulators free for more columns: with one row, 16 columns would read every fourth cache line.
  static constexpr int vectors(int rows) {
    int count = 4;
    while (count > kVectors && rows * count > kRows * kVectors) count /= 2;
    return count;
  }
  static_assert(kPanel % (16 * 4) == 0 && (kVectors & (kVectors - 1)) == 0, "tiles cover a panel exactly");
};
constexpr int kMaxTileRows = 6;
constexpr int64_t kFewRows = 24;    // are not shared out
constexpr int64_t kBlockRows = 96;  // rows whose sums are kept while K runs: 24 KiB of the first cache
// K runs in chunks of at most this much of a panel. Two chunks fit the second cache; and sums of chunks lose less than
// one long sum: at K = 8192 the error is a quarter. Where chunks end decides about bits, so it depends on K alone.
constexpr int64_t kChunkBytes = 128 * 1024;

// A step of K is one element of float, two of bf16.
float read_step(const float* x) { return *x; }
uint32_t read_step(const bf16* x) { return read_pair(x); }
f32x16 broadcast_step(float x) { return f32x16::broadcast(x); }
bf16x32 broadcast_step(uint32_t x) { return broadcast_pair(x); }
f32x16 load_step(const float* w) { return load(w); }
bf16x32 load_step(const bf16* w) { return load_pairs(w); }
f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) { return fma(a, b, c); }
f32x16 multiply_add(bf16x32 a, bf16x32 b, f32x16 c) { return dot_pairs(a, b, c); }

// sums[R][64] = x[R][k] * panel, or += where not is_first, for V * 16 columns. x, panel and sums begin at the tile's
// first row and column. Each step of K brings a cache line from `ahead` on into the second cache, unless it is null.
template <int R, int V, class T>
void multiply(const T* x, int64_t x_stride, const T* panel, int64_t k, bool is_first, float* sums, const char* ahead) {
  f32x16 sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sum[r][v] = f32x16::zero();
  }
  const auto step = [&](int64_t i, auto read_x) {
    if (ahead) {
      __builtin_prefetch(ahead, 0, 2);
      ahead += 64;
    }
    const T* w = panel + i * kPanel * kPairing<T>;
    decltype(load_step(w)) columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) columns[v] = load_step(w + 16 * v * kPairing<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto a = broadcast_step(read_x(x + r * x_stride + i * kPairing<T>));
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = multiply_add(a, columns[v], sum[r][v]);
    }
  };
  for (int64_t i = 0; i < k / kPairing<T>; ++i) step(i, [](const T* p) { return read_step(p); });
  if constexpr (kPairing<T> == 2) {
    // an odd K: what lies after the row is not ours, and may be NaN
    if (k % 2) step(k / 2, [](const T* p) { return uint32_t{p->bits}; });
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      float* total = sums + r * kPanel + 16 * v;
      store(total, is_first ? sum[r][v] : load(total) + sum[r][v]);
    }
  }
}

// All 64 columns of a panel for `rows` rows, at most TileShape::kRows.
template <class T, int R = TileShape<T>::kRows>
void multiply_rows(int64_t rows, const T* x, int64_t x_stride, const T* panel, int64_t k, bool is_first, float* sums,
                   const char* ahead) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rows<T, R - 1>(rows, x, x_stride, panel, k, is_first, sums, ahead);
  }
  constexpr int kVectors = TileShape<T>::vectors(R);
  for (int column = 0; column < kPanel; column += 16 * kVectors) {
    multiply<R, kVectors>(x, x_stride, panel + column * kPairing<T>, k, is_first, sums + column, ahead);
    ahead = nullptr;
  }
}

// Bias, activation and residual of a tile, and its way into `out`. Columns past num_columns are not written.
// rows: at most TileShape::kRows from first_row on; product: [rows][64].
template <class T, class Out>
void finish_rows(const PackedLinearParams<T, Out>& p, int64_t panel, int64_t first_row, int64_t rows,
                 const float* product) {
  const bool is_gated = p.activation != Activation::kNone;
  const int columns_per_panel = is_gated ? kGatedHalf : kPanel;
  const int64_t first_column = panel * columns_per_panel;
  const float* bias = p.bias ? p.bias + panel * kPanel : nullptr;
  if (!is_gated && !bias && !p.residual && first_column + kPanel <= p.num_columns) {
    // without a choice for each vector: +3 % at K = 576
    for (int64_t r = 0; r < rows; ++r) {
      Out* out = p.out + (first_row + r) * p.out_stride + first_column;
      for (int column = 0; column < kPanel; column += 16) store(out + column, load(product + r * kPanel + column));
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r, product += kPanel) {
    Out* out = p.out + (first_row + r) * p.out_stride + first_column;
    const T* residual = p.residual ? p.residual + (first_row + r) * p.residual_stride + first_column : nullptr;
    for (int column = 0; column < columns_per_panel && first_column + column < p.num_columns; column += 16) {
      const int64_t count = p.num_columns - first_column - column;
      f32x16 value = load(product + column);
      if (bias) value = value + load(bias + column);
      if (is_gated) {
        f32x16 up = load(product + kGatedHalf + column);
        if (bias) up = up + load(bias + kGatedHalf + column);
        value = activate_gated(value, up, p.activation);
      }
      if (residual) value = value + load_partial(residual + column, count);
      store_partial(out + column, value, count);
    }
  }
}

// What a tile adds to the largest logits of its rows, instead of being written.
template <class T>
void keep_largest(const PackedArgmaxParams<T>& p, int64_t panel, int64_t rows, const float* product,
                  LargestLogit* largest) {
  const int64_t first_column = panel * kPanel;
  const bool is_changed = p.scale != 1.0f || p.softcap > 0.0f;
  for (int64_t r = 0; r < rows; ++r, product += kPanel) {
    LargestLanes row(largest[r]);
    for (int column = 0; column < kPanel && first_column + column < p.num_columns; column += 16) {
      f32x16 logits = load(product + column);
      if (is_changed) logits = finish_logit(logits, p.scale, p.softcap);
      const int64_t count = p.num_columns - first_column - column;
      if (count < 16) {
        logits = select_first(count, logits, f32x16::broadcast(-std::numeric_limits<float>::infinity()));
      }
      row.take(logits, static_cast<float>((first_column + column) / 16));
    }
    row.save(largest[r]);
  }
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
  // Part i of `parts` about equal ones.
  Range part(int64_t i, int64_t parts) const { return {begin + size() * i / parts, begin + size() * (i + 1) / parts}; }
};

// One panel by a block of rows. K runs in chunks that stay in the second cache while all rows use them; meanwhile the
// next chunk, or `next_panel`, is fetched: weights out of memory at M = 32 went from 680 to 880 GFLOP/s by it.
// finish(panel, first_row, rows, product) takes the tiles. P: params of a product.
template <class P, class T, class F>
void multiply_block(const P& p, int64_t panel, Range rows, const T* next_panel, const F& finish) {
  const int64_t steps = divide_up(p.k, kPairing<T>), step_size = kPanel * kPairing<T>;
  const T* weight = p.weight + panel * steps * step_size;
  const int64_t num_tiles = divide_up(rows.size(), TileShape<T>::kRows);
  const int64_t num_chunks = divide_up(steps * step_size * int64_t{sizeof(T)}, kChunkBytes);
  alignas(64) float sums[kBlockRows * kPanel];
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const Range in_steps = Range{0, steps}.part(chunk, num_chunks);
    const T* w = weight + in_steps.begin * step_size;
    const char* next =
        reinterpret_cast<const char*>(chunk + 1 < num_chunks ? w + in_steps.size() * step_size : next_panel);
    const int64_t first_k = in_steps.begin * kPairing<T>;
    const int64_t k = std::min(in_steps.end * kPairing<T>, p.k) - first_k;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const Range tile_rows = rows.part(tile, num_tiles);
      // each of four tiles fetches a quarter; with fewer than three the processor's own prefetch does as well
      const char* ahead = num_tiles < 3 || tile > 3 ? nullptr : next + tile * in_steps.size() * 64;
      float* tile_sums = num_chunks == 1 ? sums : sums + (tile_rows.begin - rows.begin) * kPanel;
      multiply_rows(tile_rows.size(), p.x + tile_rows.begin * p.x_stride + first_k, p.x_stride, w, k, chunk == 0,
                    tile_sums, ahead);
      if (chunk + 1 == num_chunks) finish(panel, tile_rows.begin, tile_rows.size(), tile_sums);
    }
  }
}

// Panels first_panel .. end_panel - 1 by the rows, on the calling thread.
template <class T, class P, class F>
void multiply_run(const P& p, int64_t first_panel, int64_t end_panel, Range rows, int64_t next_panel, const F& finish) {
  const int64_t panel_size = divide_up(p.k, kPairing<T>) * kPairing<T> * kPanel;
  const int64_t num_blocks = panel_size * int64_t{sizeof(T)} <= kChunkBytes ? 1 : divide_up(rows.size(), kBlockRows);
  for (int64_t panel = first_panel; panel < end_panel; ++panel) {
    const int64_t following = panel + 1 < end_panel ? panel + 1 : next_panel;
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t next = block + 1 < num_blocks ? panel : std::min(following, p.num_panels - 1);
      multiply_block(p, panel, rows.part(block, num_blocks), p.weight + next * panel_size, finish);
    }
  }
}

// How a product is shared out: a task is a run of panels by a share of the rows.
struct Tasks {
  int64_t num_panels, num_rows, num_threads, row_shares, panels_per_run, num_runs;

  template <class P>
  explicit Tasks(const P& p) : num_panels(p.num_panels), num_rows(p.num_rows), num_threads(p.parallel.num_threads()) {
    // Rows are shared out only where there are too few panels.
    const int64_t wanted_tasks = 8 * num_threads;
    row_shares = std::max<int64_t>(1, std::min(divide_up(wanted_tasks, num_panels), num_rows / kFewRows));
    // Where few rows leave the pace to memory, a thread reads one long run: +10 % at M = 1 and 8.
    const int64_t wanted_runs = num_rows < kFewRows ? num_threads : 2 * wanted_tasks;
    panels_per_run = std::max<int64_t>(1, num_panels / wanted_runs);
    num_runs = divide_up(num_panels, panels_per_run);
  }

  // Calls fn(run, first_panel, end_panel, rows, next_panel) for each.
  template <class F>
  void each(const Parallel& parallel, const F& fn) const {
    parallel(num_runs * row_shares, [&](int64_t task) {
      const int64_t run = task / row_shares, first_panel = run * panels_per_run;
      const int64_t end_panel = std::min(first_panel + panels_per_run, num_panels);
      // after the last of a run this thread goes on, most likely, where the others' next runs end
      fn(run, first_panel, end_panel, Range{0, num_rows}.part(task % row_shares, row_shares),
         first_panel + panels_per_run * num_threads);
    });
  }
};

}  // namespace

template <class T, class Out>
void multiply_panels(const PackedLinearParams<T, Out>& p, int64_t first_panel, int64_t end_panel, int64_t first_row,
                     int64_t end_row, int64_t next_panel) {
  multiply_run<T>(p, first_panel, end_panel, Range{first_row, end_row}, next_panel,
                  [&](int64_t panel, int64_t row, int64_t rows, const float* product) {
                    finish_rows(p, panel, row, rows, product);
                  });
}

template <class T, class Out>
void packed_linear(const PackedLinearParams<T, Out>& p) {
  Tasks(p).each(p.parallel, [&](int64_t, int64_t first_panel, int64_t end_panel, Range rows, int64_t next_panel) {
    multiply_panels(p, first_panel, end_panel, rows.begin, rows.end, next_panel);
  });
}

template <class T>
void packed_argmax(const PackedArgmaxParams<T>& p) {
  struct Found {
    float logit;  // NaN where the row is spoilt
    int32_t column;
  };
  const Tasks tasks(p);
  std::vector<Found> found(static_cast<size_t>(tasks.num_runs * p.num_rows));  // [num_runs, num_rows]
  tasks.each(p.parallel, [&](int64_t run, int64_t first_panel, int64_t end_panel, Range rows, int64_t next_panel) {
    std::vector<LargestLogit> largest(static_cast<size_t>(rows.size()));
    for (LargestLogit& row : largest) row.clear();
    multiply_run<T>(p, first_panel, end_panel, rows, next_panel,
                    [&](int64_t panel, int64_t row, int64_t count, const float* product) {
                      keep_largest(p, panel, count, product, &largest[static_cast<size_t>(row - rows.begin)]);
                    });
    Found* out = &found[static_cast<size_t>(run * p.num_rows + rows.begin)];
    for (const LargestLogit& row : largest) {
      *out++ = {row.is_spoilt() ? NAN : row.largest(), row.column()};
    }
  });
  for (int64_t row = 0; row < p.num_rows; ++row) {
    Found best{-std::numeric_limits<float>::infinity(), -1};
    for (int64_t run = 0; run < tasks.num_runs; ++run) {
      const Found& other = found[static_cast<size_t>(run * p.num_rows + row)];
      if (other.logit != other.logit) {
        best.column = -1;
        break;
      }
      if (other.logit > best.logit) best = other;
    }
    p.token_ids[row] = best.column;
  }
}

template void packed_linear(const PackedLinearParams<bf16, bf16>&);
template void packed_linear(const PackedLinearParams<bf16, float>&);
template void packed_linear(const PackedLinearParams<float, float>&);
template void packed_argmax(const PackedArgmaxParams<bf16>&);
template void packed_argmax(const PackedArgmaxParams<float>&);
template void multiply_panels(const PackedLinearParams<bf16, bf16>&, int64_t, int64_t, int64_t, int64_t, int64_t);
template void multiply_panels(const PackedLinearParams<float, float>&, int64_t, int64_t, int64_t, int64_t, int64_t);

}  // namespace pagedllm
