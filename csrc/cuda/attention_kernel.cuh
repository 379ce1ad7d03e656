// The attention of one item: ROWS packed rows (token, head in group) over a range of keys, on tensor cores.
//
//   64, 128 rows   prefill: each of 4 warps has 16 or 32 rows, all keys, all columns
//   16 rows        decode: the 4 warps share the rows; for q.k each has 16 of a tile's 64 keys, for p.v a quarter of
//   the
//                  columns over all 64 keys
//
// Both do the same operations on a row in the same order (exactness rule b): q.k runs over head_dim in order, the
// maximum is over the tile's 64 keys, the row's sum is p times a column of ones on the tensor cores, p.v runs over the
// keys in order. So a row's bits do not depend on the tile it falls into.
#pragma once
#include "cuda/attention_merge.cuh"

namespace pagedllm {

template <class T>
struct OnePair;  // a register of two ones
template <>
struct OnePair<bf16> {
  static constexpr uint32_t kBits = 0x3f803f80u;
};
template <>
struct OnePair<half> {
  static constexpr uint32_t kBits = 0x3c003c00u;
};

template <class T, int D, int ROWS>
class AttentionBlock {
  using S = Tile<D, ROWS>;
  using Item = ItemContext<S>;
  using RowSwizzle = Swizzle<S::kChunks>;        // of Q, K and V
  using WeightSwizzle = Swizzle<kTileKeys / 8>;  // of P
  static constexpr int G = S::kGroups;
  static constexpr int N = S::kKeyTiles;
  static constexpr int C = 2 * S::kWarpPairs;  // n8 tiles of output columns

 public:
  __device__ __forceinline__ explicit AttentionBlock(const Item& context) : p(context.p), item(context) {}

  __device__ __forceinline__ void run() {
    if (item.state().first_visible >= item.work().end_key)
      return;  // a window hides all its keys; nobody reads its slot
    KvStream<T, D, ROWS> stream(item);
    load_q();
    int tile = item.state().first_visible / kTileKeys, slot_byte = S::kFixedBytes;
    fill_slots<0>(stream, tile);
    bool has_carry = false, is_first = true;
    while (true) {
      reset();
      if (S::kSharesRows && is_first && has_flag(kContinues)) load_state();
      const int split_end = has_flag(kCarries) ? (tile / kTilesPerSplit + 1) * kTilesPerSplit : end_tile();
      for (const int end = split_end < end_tile() ? split_end : end_tile(); tile < end; ++tile) {
        next_half<0>(stream, tile, slot_byte);
        if (S::kKeepsQ && is_first) load_q_fragments();
        is_first = false;
        uint32_t weights[G][N][2];  // p as 16-bit pairs: of rows g and g + 8
        if (is_active()) {
          float s[G][N][4];
          scores(slot_byte, s);
          hide_keys(tile * kTileKeys, s);
          softmax(s, weights);
        }
        slot_byte = S::next_slot(slot_byte);
        next_half<1>(stream, tile, slot_byte);
        if (is_active()) accumulate(slot_byte, weights);
        slot_byte = S::next_slot(slot_byte);
      }
      if (has_carry && is_active()) join_carry();
      has_carry = tile < end_tile();
      if (!has_carry && (item.work().slot < 0 || has_flag(kCarries))) break;
      if (is_active()) save();
      if (!has_carry) return;
    }
    store_output();
  }

 private:
  // Read where they are used: registers are what limits the tile.
  struct Place {
    int warp, lane;
  };
  __device__ __forceinline__ static Place place() {
    const int thread = thread_index();
    return {thread >> 5, thread & 31};
  }
  __device__ __forceinline__ static int warp_index() { return thread_index() >> 5; }
  // Warps without rows only copy.
  __device__ __forceinline__ static bool is_active() { return warp_index() * S::kWarpRows < Item::work().num_rows; }
  __device__ __forceinline__ static int end_tile() { return (Item::work().end_key + kTileKeys - 1) / kTileKeys; }
  __device__ __forceinline__ static bool has_flag(AttentionFlag flag) { return (Item::work().flags & flag) != 0; }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < G; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max[i][h] = kNoKey;
        sum[i][h] = 0.f;
      }
#pragma unroll
      for (int n = 0; n < C; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][n][e] = 0.f;
    }
  }

  // Starts the first copies, into all slots but one.
  template <int HALVES>
  __device__ __forceinline__ static void fill_slots(KvStream<T, D, ROWS>& stream, int tile) {
    if constexpr (HALVES < S::kSlots - 1) {
      stream.template start<HALVES>(tile, S::kFixedBytes + HALVES * S::kSlotBytes);
      copy_async_commit();
      fill_slots<HALVES + 1>(stream, tile);
    }
  }
  // Waits for K (or V, HALF = 1) of a tile, and starts the copy that takes the place of the half tile before.
  template <int HALF>
  __device__ __forceinline__ static void next_half(KvStream<T, D, ROWS>& stream, int tile, int slot_byte) {
    copy_async_wait<S::kSlots - 2>();
    __syncthreads();  // all threads' copies have arrived, and all have done with the slot that is filled next
    stream.template start<HALF + S::kSlots - 1>(tile, S::previous_slot(slot_byte));
    copy_async_commit();
  }

  __device__ __forceinline__ void load_q() {
    const T* q = static_cast<const T*>(p.q);
    const int thread = thread_index();
#pragma unroll
    for (int i = 0; i < (ROWS * S::kChunks + kThreads - 1) / kThreads; ++i) {
      const unsigned index = static_cast<unsigned>(thread + i * kThreads);
      const int row = static_cast<int>(index / S::kChunks), chunk = static_cast<int>(index % S::kChunks);
      if (ROWS * S::kChunks % kThreads != 0 && index >= ROWS * S::kChunks) break;
      const bool is_valid = row < item.work().num_rows;
      const T* from = q + item.offset(item.work().first_row + (is_valid ? row : 0), p.q_stride, D) + chunk * 8;
      copy_async(RowSwizzle::byte(row, chunk), from, is_valid);
    }
  }
  __device__ __forceinline__ int q_byte() const {
    const auto [warp, lane] = place();
    return RowSwizzle::byte(warp * S::kWarpRows + (lane & 15), lane >> 4);
  }
  __device__ __forceinline__ void load_q_fragments() {
#pragma unroll
    for (int k = 0; k < S::kSteps; ++k) load_matrix(q_fragments[k], RowSwizzle::advance(q_byte(), 2 * k));
  }

  // s = q.k of this warp's keys of a tile.
  __device__ __forceinline__ void scores(int k_slot, float (&s)[G][N][4]) {
#pragma unroll
    for (int i = 0; i < G; ++i)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][n][e] = 0.f;
    const auto [warp, lane] = place();
    const int first_key = S::kSharesRows ? 16 * warp : 0;
    const int k_byte = k_slot + RowSwizzle::byte(first_key + (lane & 7) + (lane >> 4 << 3), lane >> 3 & 1);
#pragma unroll
    for (int k = 0; k < S::kSteps; ++k) {
      uint32_t again[G][4];
      if (!S::kKeepsQ) {
#pragma unroll
        for (int i = 0; i < G; ++i)
          load_matrix(again[i], RowSwizzle::advance(q_byte(), 2 * k) + 16 * i * RowSwizzle::kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < N / 2; ++n) {
        uint32_t b[4];
        load_matrix(b, RowSwizzle::advance(k_byte, 2 * k) + 16 * n * RowSwizzle::kRowBytes);
#pragma unroll
        for (int i = 0; i < G; ++i) {
          const uint32_t (&a)[4] = S::kKeepsQ ? q_fragments[k] : again[i];
          multiply_add<T>(s[i][2 * n], a, b[0], b[1]);
          multiply_add<T>(s[i][2 * n + 1], a, b[2], b[3]);
        }
      }
    }
    if (p.softcap > 0.f) {
#pragma unroll
      for (int i = 0; i < G; ++i)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)  // tanh(x) = 1 - 2 / (1 + e^2x); tanh.approx would be off by 2^-11 * softcap
            s[i][n][e] = p.softcap * (1.f - 2.f * reciprocal_fast(1.f + exp2_fast(s[i][n][e] * p.tanh_scale)));
    }
  }

  // Keys after a row's token, or before its window. Most tiles lie wholly inside and skip this.
  __device__ __forceinline__ void hide_keys(int first_key, float (&s)[G][N][4]) {
    const auto [warp, lane] = place();
    const int first_row = item.work().first_row + warp * S::kWarpRows;
    const int warp_key = first_key + (S::kSharesRows ? 16 * warp : 0);
    const unsigned window = p.window > 0 ? static_cast<unsigned>(p.window) : 0x7fffffffu;
    const bool is_full = item.is_shared()
                             ? p.window <= 0
                             : warp_key + 8 * N - 1 <= item.position(first_row) &&
                                   static_cast<unsigned>(item.position(first_row + 16 * G - 1) - warp_key) < window;
    if (is_full) return;
#pragma unroll
    for (int i = 0; i < G; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int distance = item.position(first_row + 16 * i + 8 * h + lane / 4) - warp_key - 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)  // as unsigned, a key after the row's token is farther than any window
            if (static_cast<unsigned>(distance - 8 * n - e) >= window) s[i][n][2 * h + e] = kNoKey;
      }
  }

  // Scores to weights; the maximum moves on, and with it the accumulators. Where the warps share the rows they exchange
  // their maxima here, and their weights through P; the barrier after that is next_half's.
  __device__ __forceinline__ void softmax(float (&s)[G][N][4], uint32_t (&weights)[G][N][2]) {
    // tanh needs the scaled score, so a softcap has the scale already; else it is folded into the exponent
    const float log2_scale = p.softcap > 0.f ? kLog2E : p.scale * kLog2E;
    float factor[G][2];
    bool has_moved = false;
    if (S::kSharesRows) share_max(s[0]);
#pragma unroll
    for (int i = 0; i < G; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float tile_max = S::kSharesRows ? shared_max(h) : row_max(s[i], h);
        const float new_max = fmaxf(max[i][h], __fmul_rn(tile_max, log2_scale));
        const float base = new_max == kNoKey ? 0.f : new_max;
        factor[i][h] = exp2_fast(max[i][h] - base);
        has_moved |= new_max != max[i][h];
        max[i][h] = new_max;
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const float low = exp2_fast(__fmaf_rn(s[i][n][2 * h], log2_scale, -base));
          const float high = exp2_fast(__fmaf_rn(s[i][n][2 * h + 1], log2_scale, -base));
          weights[i][n][h] = pack<T>(low, high);
        }
      }
    if (S::kSharesRows) {
      const auto [warp, lane] = place();
      const int p_byte = S::kPByte + WeightSwizzle::byte(lane / 4, 2 * warp) + 4 * (lane % 4);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          *shared_memory<uint32_t>(WeightSwizzle::advance(p_byte, n) + 8 * h * WeightSwizzle::kRowBytes) =
              weights[0][n][h];
    }
    if (!__any_sync(kAllLanes, has_moved)) return;  // multiplying by exactly 1 changes nothing
#pragma unroll
    for (int i = 0; i < G; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[i][h] *= factor[i][h];
#pragma unroll
        for (int n = 0; n < C; ++n) {
          o[i][n][2 * h] *= factor[i][h];
          o[i][n][2 * h + 1] *= factor[i][h];
        }
      }
  }
  __device__ __forceinline__ float row_max(const float (&s)[N][4], int h) const {
    float m = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
    for (int n = 1; n < N; ++n) m = fmaxf(m, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));
    return fmaxf(m, __shfl_xor_sync(kAllLanes, m, 2));
  }
  __device__ __forceinline__ void share_max(const float (&s)[N][4]) {
    const float low = row_max(s, 0), high = row_max(s, 1);
    const auto [warp, lane] = place();
    if (lane % 4 == 0) {
      float* mine = shared_memory<float>(S::kMaxByte) + warp * 16 + lane / 4;
      mine[0] = low;
      mine[8] = high;
    }
    __syncthreads();
  }
  __device__ __forceinline__ float shared_max(int h) const {
    const float* all = shared_memory<float>(S::kMaxByte) + (thread_index() & 31) / 4 + 8 * h;
    return fmaxf(fmaxf(all[0], all[16]), fmaxf(all[32], all[48]));
  }

  // o += p.v, sum += p.1 over the tile's 64 keys.
  __device__ __forceinline__ void accumulate(int v_slot, const uint32_t (&weights)[G][N][2]) {
    const auto [warp, lane] = place();
    const int v_byte = v_slot + RowSwizzle::byte(lane & 15, (S::kSharesRows ? 2 * warp : 0) + (lane >> 4));
    const int p_byte = S::kPByte + WeightSwizzle::byte(lane & 15, lane >> 4);
    float sums[G][4];  // all columns of p.1 are equal: a register for each row is kept
#pragma unroll
    for (int i = 0; i < G; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][e] = sum[i][e >> 1];
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k) {
      uint32_t a[G][4];
      if (S::kSharesRows) {
        load_matrix(a[0], WeightSwizzle::advance(p_byte, 2 * k));
      } else {
#pragma unroll
        for (int i = 0; i < G; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r) a[i][r] = weights[i][2 * k + (r >> 1)][r & 1];
      }
#pragma unroll
      for (int i = 0; i < G; ++i) multiply_add<T>(sums[i], a[i], OnePair<T>::kBits, OnePair<T>::kBits);
#pragma unroll
      for (int n = 0; n < C / 2; ++n) {
        if (!has_pair(n, warp)) continue;
        uint32_t b[4];
        load_matrix_transposed(
            b, RowSwizzle::advance(v_byte, S::kSharesRows ? 8 * n : 2 * n) + 16 * k * RowSwizzle::kRowBytes);
#pragma unroll
        for (int i = 0; i < G; ++i) {
          multiply_add<T>(o[i][2 * n], a[i], b[0], b[1]);
          multiply_add<T>(o[i][2 * n + 1], a[i], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < G; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[i][h] = sums[i][2 * h];
  }
  // Whether this warp has an n-th n16 tile of output columns: it is the (warp + 4n)-th where warps share the rows.
  __device__ __forceinline__ static bool has_pair(int n, int warp) {
    return !S::kSharesRows || S::kColumnPairs % 4 == 0 || warp + 4 * n < S::kColumnPairs;
  }

  // Calls fn(group, half, row of the item) for the rows that this thread holds a part of.
  template <class F>
  __device__ __forceinline__ void for_each_row(const F& fn) {
    const auto [warp, lane] = place();
#pragma unroll
    for (int i = 0; i < G; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp * S::kWarpRows + 16 * i + 8 * h + lane / 4;
        if (row < item.work().num_rows) fn(i, h, row);
      }
  }
  // Calls fn(n8 tile of this warp, its chunk relative to the warp's first).
  template <class F>
  __device__ __forceinline__ void for_each_column(const F& fn) const {
    const int warp = warp_index();
#pragma unroll
    for (int n = 0; n < C; ++n) {
      if (has_pair(n / 2, warp)) fn(n, S::kSharesRows ? n / 2 * 8 + n % 2 : n);
    }
  }
  // The first output column of this warp, and of this thread in an n8 tile.
  __device__ __forceinline__ static int first_chunk() { return S::kSharesRows ? 2 * warp_index() : 0; }
  __device__ __forceinline__ static int first_column() { return first_chunk() * 8 + 2 * (thread_index() % 4); }
  // Where a row of the item leaves its partial result.
  struct SlotRow {
    Partial<D> partial;
    int row;
  };
  __device__ __forceinline__ SlotRow slot_row(int row) const {
    if (item.is_shared()) {
      const int packed_row = item.work().first_row + row;
      return {Partial<D>(p, item.member(packed_row).first_slot + item.work().slot, item.kv_head()),
              item.head_in_group(packed_row)};
    }
    return {Partial<D>(p, item.work().slot + row / kSlotRows * item.work().slot_stride, item.kv_head()),
            row % kSlotRows};
  }

  // The split's result, joined with what came before, to the workspace.
  __device__ __forceinline__ void save() {
    __syncwarp();  // all threads of a row have read the state that one of them overwrites
    const bool has_state = thread_index() % 4 == 0 && (!S::kSharesRows || warp_index() == 0);
    for_each_row([&](int i, int h, int row) {
      const SlotRow slot = slot_row(row);
      if (has_state) *slot.partial.state(slot.row) = make_float2(max[i][h], sum[i][h]);
      float2* accumulators = slot.partial.accumulators(slot.row, first_column());
      for_each_column(
          [&](int n, int chunk) { accumulators[chunk * 4] = make_float2(o[i][n][2 * h], o[i][n][2 * h + 1]); });
    });
  }
  // What a shared item, in a launch before, left of the split that this item goes on with. Where a window hides that
  // from the row, it may have left nothing.
  __device__ __forceinline__ void load_state() {
    for_each_row([&](int i, int h, int row) {
      if (p.window > 0 && item.position(item.work().first_row + row) - p.window + 1 >= item.work().first_key) return;
      const SlotRow slot = slot_row(row);
      const float2 state = *slot.partial.state(slot.row);
      max[i][h] = state.x;
      sum[i][h] = state.y;
      const float2* accumulators = slot.partial.accumulators(slot.row, first_column());
      for_each_column([&](int n, int chunk) {
        o[i][n][2 * h] = accumulators[chunk * 4].x;
        o[i][n][2 * h + 1] = accumulators[chunk * 4].y;
      });
    });
  }
  // What save() left there; barriers lie between.
  __device__ __forceinline__ void join_carry() {
    for_each_row([&](int i, int h, int row) {
      const SlotRow slot = slot_row(row);
      const float2 saved_state = *slot.partial.state(slot.row);
      RowState state{saved_state.x, saved_state.y};
      const float2 factors = join(state, {max[i][h], sum[i][h]});
      max[i][h] = state.max;
      sum[i][h] = state.sum;
      const float2* accumulators = slot.partial.accumulators(slot.row, first_column());
      for_each_column([&](int n, int chunk) {
        const float2 saved = accumulators[chunk * 4];
        o[i][n][2 * h] = join(saved.x, o[i][n][2 * h], factors);
        o[i][n][2 * h + 1] = join(saved.y, o[i][n][2 * h + 1], factors);
      });
    });
  }

  // In place of Q, which was last read before the barrier that the last p.v waited at. Through shared memory, so that
  // the rows leave in 16-byte stores: from the fragments they would be 4-byte ones, which write every sector twice.
  __device__ __forceinline__ void store_output() {
    if (is_active()) {
      for_each_row([&](int i, int h, int row) {
        const float sink = sink_log2(p, item.q_head(item.work().first_row + row));
        const float factor = normalizer({max[i][h], sum[i][h]}, sink);
        const int row_byte = RowSwizzle::byte(row, first_chunk()) + 4 * (thread_index() % 4);
        for_each_column([&](int n, int chunk) {
          *shared_memory<uint32_t>(RowSwizzle::advance(row_byte, chunk)) =
              pack<T>(o[i][n][2 * h] * factor, o[i][n][2 * h + 1] * factor);
        });
      });
    }
    __syncthreads();
    T* out = static_cast<T*>(p.out);
    for (int index = thread_index(); index < item.work().num_rows * S::kChunks; index += kThreads) {
      const int row = index / S::kChunks, chunk = index % S::kChunks;
      T* target = out + item.offset(item.work().first_row + row, p.out_stride, D) + chunk * 8;
      *reinterpret_cast<uint4*>(target) = *shared_memory<uint4>(RowSwizzle::byte(row, chunk));
    }
  }

  const PagedAttentionParams& p;
  const Item& item;
  uint32_t q_fragments[S::kKeepsQ ? S::kSteps : 1][4];
  float max[G][2], sum[G][2];  // of rows lane / 4 and lane / 4 + 8 of each group; max in units of log2
  float o[G][C][4];
};

// How many items of the list have more than `rows` rows.
template <int ROWS>
__device__ __forceinline__ int items_before(const PagedAttentionParams& p) {
  const int32_t* header = reinterpret_cast<const int32_t*>(p.work);
  return (ROWS < 128 ? header[1] : 0) + (ROWS < 64 ? header[2] : 0) + (ROWS < 16 ? header[3] : 0);
}

template <class T, int D, int ROWS>
__global__ void __launch_bounds__(kThreads, ROWS == 16 && D <= 128 ? 3 : 2)
    attention_kernel(const __grid_constant__ PagedAttentionParams p) {
  using Item = ItemContext<Tile<D, ROWS>>;
  // Neither the item's number nor the end of the list stays in a register while an item runs.
  int i = items_before<ROWS>(p) + static_cast<int>(blockIdx.x);
  while (i < items_before<ROWS / 2>(p)) {
    const Item item(p, i);
    __syncthreads();
    AttentionBlock<T, D, ROWS>(item).run();
    i = Item::state().index + static_cast<int>(gridDim.x);
    __syncthreads();  // shared memory is free for the next item
  }
}

template <class T, int D, int ROWS>
int launch_attention(const PagedAttentionParams& p, void* stream) {
  int num_blocks = 0;
  if (const int error = count_resident_blocks(Tile<D, ROWS>::kSharedBytes, &num_blocks)) return error;
  const int per_head = (num_blocks + p.num_kv_heads - 1) / p.num_kv_heads;
  const dim3 grid_size(static_cast<unsigned>(per_head < p.max_work ? per_head : p.max_work),
                       static_cast<unsigned>(p.num_kv_heads));
  return launch(attention_kernel<T, D, ROWS>, grid_size, dim3(kThreads), Tile<D, ROWS>::kSharedBytes, stream, p);
}

// All of a head_dim's launches: items of 128, 64 and 16 rows, then the merge.
template <class T, int D>
int launch_all(const PagedAttentionParams& p, void* stream) {
  int error = 0;
  if (p.max_work > 0) {
    if constexpr (D <= 128) {
      if (p.most_rows == 128) error = launch_attention<T, D, 128>(p, stream);
    }
    if (error == 0 && p.most_rows >= 64) error = launch_attention<T, D, 64>(p, stream);
    if (error == 0) error = launch_attention<T, D, 16>(p, stream);
  }
  if (error == 0 && p.max_merge > 0) {
    const dim3 grid_size(static_cast<unsigned>(p.max_merge), static_cast<unsigned>(p.num_kv_heads));
    error = launch(merge_kernel<T, D>, grid_size, dim3(kThreads), 0, stream, p);
  }
  return error;
}

template <int D>
int launch_attention_of(const PagedAttentionParams& p, void* stream) {
  return p.is_bf16 != 0 ? launch_all<bf16, D>(p, stream) : launch_all<half, D>(p, stream);
}

}  // namespace pagedllm
