#include "cpu/linear.h"

#include <algorithm>
#include <cstring>

#include "cpu/simd.h"
#include "cpu/vector_math.h"

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
  static_assert(kPanel % (16 * kVectors) == 0, "tiles cover a panel exactly");
};
constexpr int kMaxTileRows = 6;

// product[R][64] = x[R][k] * panel, the tile's columns only: x and panel begin at the tile's first row and column.
template <int R, int V>
void multiply(const float* x, int64_t x_stride, const float* panel, int64_t k, float* product) {
  f32x16 sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sum[r][v] = f32x16::zero();
  }
  for (int64_t i = 0; i < k; ++i) {
    f32x16 w[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = load(panel + i * kPanel + 16 * v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const f32x16 a = f32x16::broadcast(x[r * x_stride + i]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = fma(a, w[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(product + r * kPanel + 16 * v, sum[r][v]);
  }
}

template <int R, int V>
void multiply(const bf16* x, int64_t x_stride, const bf16* panel, int64_t k, float* product) {
  f32x16 sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sum[r][v] = f32x16::zero();
  }
  const auto step = [&](int64_t pair, auto read_x) {
    bf16x32 w[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = load_pairs(panel + (pair * kPanel + 16 * v) * 2);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const bf16x32 a = broadcast_pair(read_x(x + r * x_stride + 2 * pair));
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = dot_pairs(a, w[v], sum[r][v]);
    }
  };
  for (int64_t pair = 0; pair < k / 2; ++pair) step(pair, [](const bf16* p) { return read_pair(p); });
  // an odd k: what lies after the row is not ours, and may be NaN
  if (k % 2) step(k / 2, [](const bf16* p) { return uint32_t{p->bits}; });
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(product + r * kPanel + 16 * v, sum[r][v]);
  }
}

// All 64 columns of a panel for `rows` rows, at most TileShape::kRows.
template <class T, int R = TileShape<T>::kRows>
void multiply_rows(int64_t rows, const T* x, int64_t x_stride, const T* panel, int64_t k, float* product) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rows<T, R - 1>(rows, x, x_stride, panel, k, product);
  }
  constexpr int kVectors = TileShape<T>::kVectors;
  constexpr int kElements = sizeof(T) == sizeof(float) ? 1 : 2;  // of a column in a step of k
  for (int column = 0; column < kPanel; column += 16 * kVectors) {
    multiply<R, kVectors>(x, x_stride, panel + column * kElements, k, product + column);
  }
}

f32x16 activate(f32x16 x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return silu(x);
    case Activation::kGeluTanh:
      return gelu_tanh(x);
    case Activation::kGelu:
      return gelu(x);
    default:
      return x;
  }
}

// Bias, activation and residual of a tile, and its way into `out`. Columns past num_columns are not written.
template <class T, class Out>
void finish_rows(const PackedLinearParams<T, Out>& p, int64_t panel, int64_t first_row, int64_t rows,
                 const float* product) {
  const bool is_gated = p.activation != Activation::kNone;
  const int columns_per_panel = is_gated ? kGatedHalf : kPanel;
  const int64_t first_column = panel * columns_per_panel;
  const float* bias = p.bias ? p.bias + panel * kPanel : nullptr;
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
        value = activate(value, p.activation) * up;
      }
      if (residual) value = value + load_partial(residual + column, count);
      store_partial(out + column, value, count);
    }
  }
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

template <class T, class Out>
void packed_linear(const PackedLinearParams<T, Out>& p) {
  const int64_t panel_size = (sizeof(T) == sizeof(float) ? p.k : divide_up(p.k, 2) * 2) * kPanel;
  // A task is a run of panels by a block of rows. A panel stays in the cache while its rows are multiplied, so that
  // weights come from memory once; rows are split only where there are too few panels to share out evenly.
  const int64_t wanted_tasks = 8 * p.parallel.num_threads();
  const int64_t row_blocks =
      std::max<int64_t>(1, std::min(divide_up(wanted_tasks, p.num_panels), p.num_rows / (4 * kMaxTileRows)));
  const int64_t panels_per_task = std::max<int64_t>(1, p.num_panels / (2 * wanted_tasks));
  const int64_t panel_runs = divide_up(p.num_panels, panels_per_task);
  p.parallel(panel_runs * row_blocks, [&](int64_t task) {
    const int64_t first_panel = task / row_blocks * panels_per_task, block = task % row_blocks;
    const int64_t end_panel = std::min(first_panel + panels_per_task, p.num_panels);
    const int64_t first_row = p.num_rows * block / row_blocks, end_row = p.num_rows * (block + 1) / row_blocks;
    const int64_t num_tiles = divide_up(end_row - first_row, TileShape<T>::kRows);
    alignas(64) float product[kMaxTileRows * kPanel];
    for (int64_t panel = first_panel; panel < end_panel; ++panel) {
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t row = first_row + (end_row - first_row) * tile / num_tiles;
        const int64_t rows = first_row + (end_row - first_row) * (tile + 1) / num_tiles - row;
        multiply_rows(rows, p.x + row * p.x_stride, p.x_stride, p.weight + panel * panel_size, p.k, product);
        finish_rows(p, panel, row, rows, product);
      }
    }
  });
}

template void packed_linear(const PackedLinearParams<bf16, bf16>&);
template void packed_linear(const PackedLinearParams<bf16, float>&);
template void packed_linear(const PackedLinearParams<float, float>&);

}  // namespace pagedllm
