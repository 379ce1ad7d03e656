// A block has ROWS rows of one expert and 64 rows of its weight: 64 columns of the result, or 32 where gated. The
// grid's y is the tile of columns; along x blocks walk the tiles of rows, which they find in `bounds` on the device, so
// that a captured graph serves every routing.
//
//   64 rows   each of 4 warps has 16 of them and all columns
//   16 rows   the warps share the rows, each has a quarter of the columns
//
// Either way an element is a sum over k in steps of 16 in order: it has the same bits in any tile (exactness rule a).
//
// Shared memory: [first tile of each expert][stage 0: x, weight][stage 1] ... A stage is 64 elements of k: rows of
// eight 16-byte chunks, swizzled as attention's are.
#include "cuda/activation.cuh"
#include "cuda/element_type.h"
#include "cuda/elementwise.cuh"
#include "cuda/experts.h"
#include "cuda/swizzle.cuh"

namespace pagedllm {

constexpr int kThreads = 128;
constexpr int kTileK = 64;
constexpr int kWeightRows = 64;                     // of a tile
constexpr int kStages = 4;                          // a power of two
constexpr int kTileBytes = 4 * (kMaxExperts + 32);  // of the experts' first tiles

template <int ROWS>
struct ProductTile {
  static_assert(ROWS == 16 || ROWS == 64);
  static constexpr bool kSharesRows = ROWS == 16;
  static constexpr int kColumnTiles = kSharesRows ? 2 : 8;  // n8 tiles that a warp has
  static constexpr int kXBytes = ROWS * kTileK * 2;
  static constexpr int kStageBytes = kXBytes + kWeightRows * kTileK * 2;
  static constexpr int kSharedBytes = kTileBytes + kStages * kStageBytes;
  static_assert(kTileBytes % 128 == 0 && kXBytes % 128 == 0, "Swizzle::advance turns bits of a row's start");
};

// tiles[e]: how many tiles of ROWS rows the experts before e have; tiles[num_experts]: all of them have.
template <int ROWS>
__device__ __forceinline__ void count_tiles(const GroupedDenseParams& p) {
  int32_t* tiles = shared_memory<int32_t>(0);
  const int lane = thread_index();
  if (lane < 32) {
    const int each = (p.num_experts + 31) / 32, begin = lane * each;
    int sum = 0;
    for (int i = begin; i < begin + each && i < p.num_experts; ++i) {
      tiles[i] = sum;
      sum += (p.bounds[i + 1] - p.bounds[i] + ROWS - 1) / ROWS;
    }
    int before = sum;  // of all lanes up to this one
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_sync(kAllLanes, before, (lane - distance) & 31);
      if (lane >= distance) before += other;
    }
    for (int i = begin; i < begin + each && i < p.num_experts; ++i) tiles[i] += before - sum;
    if (lane == 31) tiles[p.num_experts] = before;
  }
  __syncthreads();
}

__device__ __forceinline__ int find_expert(int num_experts, int tile) {
  const int32_t* tiles = shared_memory<int32_t>(0);
  int low = 0, high = num_experts;  // tiles[low] <= tile < tiles[high]
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    if (tiles[middle] <= tile)
      low = middle;
    else
      high = middle;
  }
  return low;
}

template <class T, int ROWS, bool IS_GATED>
class ProductBlock {
  using S = ProductTile<ROWS>;
  using Rows = Swizzle<kTileK / 8>;
  static constexpr int kColumns = IS_GATED ? kWeightRows / 2 : kWeightRows;  // of the result

 public:
  __device__ __forceinline__ ProductBlock(const GroupedDenseParams& params, int expert, int tile)
      : p(params),
        expert_(expert),
        first_row_(p.bounds[expert] + (tile - shared_memory<int32_t>(0)[expert]) * ROWS),
        end_row_(p.bounds[expert + 1]),
        first_column_(static_cast<int>(blockIdx.y) * kColumns) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[n][e] = 0.f;
    const int num_steps = (p.k + kTileK - 1) / kTileK;
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      load(stage, stage);
      copy_async_commit();
    }
    for (int step = 0, stage = 0; step < num_steps; ++step) {
      copy_async_wait<kStages - 2>();
      __syncthreads();  // all threads' copies have arrived, and all have done with the stage that is filled next
      load(step + kStages - 1, (stage + kStages - 1) & (kStages - 1));
      copy_async_commit();
      if (is_active()) multiply(kTileBytes + stage * S::kStageBytes);
      stage = (stage + 1) & (kStages - 1);
    }
    if (is_active()) store();
    copy_async_wait<0>();
    __syncthreads();  // the stages are free for the next tile
  }

 private:
  __device__ __forceinline__ static int first_warp_row() { return S::kSharesRows ? 0 : (thread_index() >> 5) * 16; }
  // Warps without rows only copy.
  __device__ __forceinline__ bool is_active() const { return first_row_ + first_warp_row() < end_row_; }

  // The column that a row of the tile's weight is of. Where gated, eight rows of gate and eight of up take turns, so
  // that a thread has both for a column.
  __device__ __forceinline__ int column_of(int row) const {
    return first_column_ + (IS_GATED ? (row >> 4) * 8 + (row & 7) : row);
  }

  // Starts the copies of 64 elements of k; zeros where there are no rows, columns or elements.
  __device__ __forceinline__ void load(int step, int stage) const {
    const T* x = static_cast<const T*>(p.x);
    const T* weights = static_cast<const T*>(p.weights);
    const int64_t first_weight = static_cast<int64_t>(expert_) * p.width * (IS_GATED ? 2 : 1);
    const int stage_byte = kTileBytes + stage * S::kStageBytes;
#pragma unroll
    for (int i = 0; i < (ROWS + kWeightRows) * 8 / kThreads; ++i) {
      const int index = thread_index() + i * kThreads, chunk = index & 7, k = step * kTileK + chunk * 8;
      if (i < ROWS * 8 / kThreads) {
        const int row = index >> 3;
        const bool is_valid = k < p.k && first_row_ + row < end_row_;
        copy_async(stage_byte + Rows::byte(row, chunk), x + (is_valid ? (first_row_ + row) * p.x_stride + k : 0),
                   is_valid);
      } else {
        const int row = (index >> 3) - ROWS, column = column_of(row);
        const bool is_valid = k < p.k && column < p.width;
        const int64_t weight_row = first_weight + column + (IS_GATED && (row & 8) != 0 ? p.width : 0);
        copy_async(stage_byte + S::kXBytes + Rows::byte(row, chunk), weights + (is_valid ? weight_row * p.k + k : 0),
                   is_valid);
      }
    }
  }

  __device__ __forceinline__ void multiply(int stage_byte) {
    const int lane = thread_index() & 31, warp = thread_index() >> 5;
    const int x_byte = stage_byte + Rows::byte(first_warp_row() + (lane & 15), lane >> 4);
    const int first_weight_row = S::kSharesRows ? 16 * warp : 0;
    const int weight_byte =
        stage_byte + S::kXBytes + Rows::byte(first_weight_row + (lane & 7) + (lane >> 4 << 3), lane >> 3 & 1);
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      uint32_t a[4];
      load_matrix(a, Rows::advance(x_byte, 2 * k));
#pragma unroll
      for (int n = 0; n < S::kColumnTiles; n += 2) {
        uint32_t b[4];
        load_matrix(b, Rows::advance(weight_byte, 2 * k) + 8 * n * Rows::kRowBytes);
        multiply_add<T>(c[n], a, b[0], b[1]);
        multiply_add<T>(c[n + 1], a, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ float bias_of(int weight_row) const {
    if (p.biases == nullptr) return 0.f;
    const int64_t first = static_cast<int64_t>(expert_) * p.width * (IS_GATED ? 2 : 1);
    return to_float(static_cast<const T*>(p.biases)[first + weight_row]);
  }

  // A thread has two neighbouring columns of two rows in each n8 tile.
  __device__ __forceinline__ void store() {
    const int lane = thread_index() & 31, warp = thread_index() >> 5;
    const int first_tile = S::kSharesRows ? 2 * warp : 0;
#pragma unroll
    for (int n = 0; n < S::kColumnTiles; n += IS_GATED ? 2 : 1) {
      const int column = first_column_ + (first_tile + n) * (IS_GATED ? 4 : 8) + 2 * (lane % 4);
      if (column >= p.width) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row_ + first_warp_row() + 8 * h + lane / 4;
        if (row >= end_row_) continue;
        float values[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          values[e] = c[n][2 * h + e] + bias_of(column + e);
          if constexpr (IS_GATED)
            values[e] = activate_gated(values[e], c[n + 1][2 * h + e] + bias_of(p.width + column + e), p.activation);
        }
        *reinterpret_cast<uint32_t*>(static_cast<T*>(p.out) + row * p.out_stride + column) =
            pack<T>(values[0], values[1]);
      }
    }
  }

  const GroupedDenseParams& p;
  int expert_, first_row_, end_row_, first_column_;
  float c[S::kColumnTiles][4];
};

template <class T, int ROWS, bool IS_GATED>
__global__ void __launch_bounds__(kThreads) grouped_dense_kernel(const __grid_constant__ GroupedDenseParams p) {
  count_tiles<ROWS>(p);
  const int num_tiles = shared_memory<int32_t>(0)[p.num_experts];
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles; tile += static_cast<int>(gridDim.x))
    ProductBlock<T, ROWS, IS_GATED>(p, find_expert(p.num_experts, tile), tile).run();
}

template <class T, int ROWS, bool IS_GATED>
int launch_grouped_dense(const GroupedDenseParams& p, void* stream) {
  int num_blocks = 0;
  if (const int error = count_resident_blocks(ProductTile<ROWS>::kSharedBytes, &num_blocks)) return error;
  const int columns = IS_GATED ? kWeightRows / 2 : kWeightRows, column_tiles = (p.width + columns - 1) / columns;
  const int experts = p.num_experts < p.num_rows ? p.num_experts : p.num_rows;  // that have rows, at most
  const int most_tiles = experts + p.num_rows / ROWS, walkers = (num_blocks + column_tiles - 1) / column_tiles;
  return launch(grouped_dense_kernel<T, ROWS, IS_GATED>,
                grid_of(walkers < most_tiles ? walkers : most_tiles, column_tiles), dim3(kThreads),
                ProductTile<ROWS>::kSharedBytes, stream, p);
}

template <class T, bool IS_GATED>
int launch_of(const GroupedDenseParams& p, void* stream) {
  // with few rows an expert, tiles of 16 leave the warps less to do for rows that are not there
  return p.num_rows <= 8 * p.num_experts ? launch_grouped_dense<T, 16, IS_GATED>(p, stream)
                                         : launch_grouped_dense<T, 64, IS_GATED>(p, stream);
}

template <class T>
int launch_any(const GroupedDenseParams& p, void* stream) {
  return p.activation != 0 ? launch_of<T, true>(p, stream) : launch_of<T, false>(p, stream);
}

int grouped_dense(const GroupedDenseParams& p, void* stream) {
  if (p.num_rows == 0) return 0;
  return p.is_bf16 != 0 ? launch_any<bf16>(p, stream) : launch_any<half>(p, stream);
}

}  // namespace pagedllm
