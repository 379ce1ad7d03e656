// The shape of a block's work, its shared memory, and the stream of K and V tiles through it.
//
// Shared memory of a block:
//
//   [ Q: ROWS x head_dim, at the end the output ][ P: 16 x 64 ][ row maxima: 4 x 16 ][ slot 0 ][ slot 1 ] ... [ slot
//   N-1 ]
//                                                 only where the warps share the rows
//
// A slot holds 64 keys of K or of V. K of tile 0, V of tile 0, K of tile 1, ... run through the ring of slots; all but
// one are being filled while one is read. Rows of 16-byte chunks are swizzled, so that eight rows at one chunk
// (ldmatrix) and eight chunks of one row (cp.async) both touch all 32 banks once.
#pragma once
#include "cuda/attention.h"
#include "cuda/device.cuh"
#include "cuda/swizzle.cuh"

namespace pagedllm {

constexpr int kTileKeys = 64;    // keys reduced together, at absolute positions: part of the result's definition
constexpr int kSplitKeys = 512;  // keys of one partial result, likewise
constexpr int kTilesPerSplit = kSplitKeys / kTileKeys;
constexpr int kSlotRows = 16;            // rows of one partial result
constexpr int kThreads = 128;            // of a block
constexpr int kSharedLimit = 99 * 1024;  // every GPU from sm_80 on gives a block that much

template <int D, int ROWS>
struct Tile {
  static_assert(D % 16 == 0 && D <= 256, "head_dim is cut into k-steps of 16");
  static_assert(ROWS == 16 || ROWS == 64 || ROWS == 128, "16 rows: the warps share the rows; else each has its own");
  static constexpr bool kSharesRows = ROWS == 16;      // warps split the keys for q.k, then the columns for p.v
  static constexpr int kGroups = ROWS == 128 ? 2 : 1;  // of 16 rows, that a warp holds: each K and V fragment feeds all
  static constexpr int kWarpRows = kSharesRows ? 0 : 16 * kGroups;  // between the first rows of neighbouring warps
  static constexpr int kChunks = D / 8;
  static constexpr int kSteps = D / 16;                  // k-steps of q.k
  static constexpr int kKeyTiles = kSharesRows ? 2 : 8;  // n8 tiles of keys a warp has
  static constexpr int kColumnPairs = D / 16;            // n16 tiles of output columns
  static constexpr int kWarpPairs = kSharesRows ? (kColumnPairs + 3) / 4 : kColumnPairs;
  static constexpr bool kKeepsQ = kGroups == 1 && (kSharesRows || D <= 128);  // else Q is read again for every tile
  static constexpr int kQBytes = ROWS * D * 2;
  static constexpr int kPBytes = kSharesRows ? 16 * kTileKeys * 2 : 0;
  static constexpr int kMaxBytes = kSharesRows ? 4 * 16 * 4 : 0;
  static constexpr int kSlotBytes = kTileKeys * D * 2;
  static constexpr int kPByte = kQBytes, kMaxByte = kPByte + kPBytes;
  static constexpr int kItemByte = kMaxByte + kMaxBytes, kItemBytes = 128;
  static constexpr int kFixedBytes = kItemByte + kItemBytes;
  static_assert(kFixedBytes % 128 == 0 && kSlotBytes % 128 == 0, "Swizzle::advance turns bits of a row's start");
  static constexpr int kWantedSlots =
      kSharesRows ? 6 : 4;  // decode is bound by memory: three tiles of K and V in flight
  static constexpr int kFittingSlots = (kSharedLimit - kFixedBytes) / kSlotBytes;
  static constexpr int kSlots = kFittingSlots < kWantedSlots ? kFittingSlots : kWantedSlots;
  static_assert(kSlots >= 2, "one slot is filled while another is read");
  static constexpr int kSharedBytes = kFixedBytes + kSlots * kSlotBytes;
  __device__ __forceinline__ static int next_slot(int slot_byte) {
    return slot_byte + kSlotBytes == kSharedBytes ? kFixedBytes : slot_byte + kSlotBytes;
  }
  __device__ __forceinline__ static int previous_slot(int slot_byte) {
    return slot_byte == kFixedBytes ? kSharedBytes - kSlotBytes : slot_byte - kSlotBytes;
  }
  static_assert(kTileKeys * kChunks % kThreads == 0, "every thread copies as many chunks of a tile");
};

// What a block knows of its item, in shared memory: registers are what limits the tile, and these are read seldom.
struct ItemState {
  AttentionWork work;
  int index;
  int query_offset;   // absolute position of the sequence's first new token
  int first_visible;  // the first key that any row of the item sees; what lies before, in whole splits, are other items
};

template <class S>
struct ItemContext {
  static_assert(sizeof(ItemState) <= S::kItemBytes && sizeof(AttentionWork) == 2 * sizeof(uint4));
  static constexpr bool kCanShare = !S::kSharesRows && S::kGroups == 1;  // items of 64 rows
  const PagedAttentionParams& p;

  // Reads the item; until a barrier, thread 0 alone knows it.
  __device__ __forceinline__ ItemContext(const PagedAttentionParams& params, int index) : p(params) {
    if (thread_index() != 0) return;
    ItemState& item = *shared_memory<ItemState>(S::kItemByte);
    const uint4* source = reinterpret_cast<const uint4*>(p.work + 1 + index);
    reinterpret_cast<uint4*>(&item.work)[0] = source[0];
    reinterpret_cast<uint4*>(&item.work)[1] = source[1];
    item.index = index;
    const int seq = item.work.seq;
    item.query_offset = is_shared() ? 0 : p.seq_lens[seq] - (p.cu_seqlens_q[seq + 1] - p.cu_seqlens_q[seq]);
    const int least_position = is_shared() ? p.seq_lens[item.work.slot_stride] - 1 : position(item.work.first_row);
    const int window_begin = p.window > 0 ? least_position - p.window + 1 : 0;
    item.first_visible = window_begin > item.work.first_key ? window_begin : item.work.first_key;
  }
  __device__ __forceinline__ static const ItemState& state() { return *shared_memory<ItemState>(S::kItemByte); }
  __device__ __forceinline__ static const AttentionWork& work() { return state().work; }
  __device__ __forceinline__ static bool is_shared() { return kCanShare && (work().flags & kShared) != 0; }
  __device__ __forceinline__ static int kv_head() { return static_cast<int>(blockIdx.y); }
  __device__ __forceinline__ int token_of(int row) const {
    return FastDivisor{static_cast<uint32_t>(p.group), p.group_magic}.divide(row);
  }
  __device__ __forceinline__ int head_in_group(int row) const { return row - token_of(row) * p.group; }
  // Of a shared item, the sequence that a row is of.
  __device__ __forceinline__ const AttentionMerge& member(int row) const {
    return p.merge[1 + work().seq + token_of(row)];
  }
  __device__ __forceinline__ int position(int row) const {
    if (!is_shared()) return state().query_offset + token_of(row);
    const int last_row = work().first_row + work().num_rows - 1;  // rows past the item have nobody
    return p.seq_lens[member(row < last_row ? row : last_row).seq] - 1;
  }
  // Elements between the start of q (or out) and a packed row's 16-byte chunk.
  __device__ __forceinline__ int64_t offset(int row, int64_t token_stride, int head_dim) const {
    const int token = is_shared() ? p.cu_seqlens_q[member(row).seq] : p.cu_seqlens_q[work().seq] + token_of(row);
    return token * token_stride + static_cast<int64_t>(q_head(row)) * head_dim;
  }
  __device__ __forceinline__ int q_head(int row) const { return kv_head() * p.group + head_in_group(row); }
  __device__ __forceinline__ const int32_t* block_ids() const {
    const int seq = is_shared() ? work().slot_stride : work().seq;
    return p.block_table + static_cast<int64_t>(seq) * p.block_table_stride;
  }
};

// Fills the ring of slots. The stream is K of a tile, V of it, K of the next, ...
template <class T, int D, int ROWS>
class KvStream {
  using S = Tile<D, ROWS>;
  using Item = ItemContext<S>;

 public:
  __device__ __forceinline__ explicit KvStream(const Item& item) : item_(item) {
    load_block_ids(item.state().first_visible / kTileKeys);
  }

  // Starts the copy of the half tile that comes so many after K of `tile`, if there is one; calls go in order. Keys
  // that nobody may see become zeros: 0 * NaN in p.v would poison a row.
  template <int HALVES>
  __device__ __forceinline__ void start(int tile, int slot_byte) {
    constexpr bool kIsV = HALVES % 2 == 1;
    tile += HALVES / 2;
    const int first_key = tile * kTileKeys;
    const int first_visible = item_.state().first_visible, end_key = item_.work().end_key;
    if (first_key >= end_key) return;
    const PagedAttentionParams& p = item_.p;
    const T* source = static_cast<const T*>(kIsV ? p.v_cache : p.k_cache) +
                      static_cast<int64_t>(item_.kv_head()) * p.cache_head_stride;
    const int first_block = (first_key & (kSplitKeys - 1)) >> p.block_shift;  // within the split
    const int ids = (first_block & 32) != 0 ? ids_high_ : ids_low_;
    const int offset_mask = (1 << p.block_shift) - 1, thread = thread_index();
#pragma unroll
    for (int i = 0; i < kTileKeys * S::kChunks / kThreads; ++i) {
      const unsigned index = static_cast<unsigned>(thread + i * kThreads);  // unsigned: a division is a shift
      const int row = static_cast<int>(index / S::kChunks), chunk = static_cast<int>(index % S::kChunks);
      const int key = first_key + row;
      const int block = __shfl_sync(kAllLanes, ids, (first_block + (row >> p.block_shift)) & 31);
      const bool is_valid = key >= first_visible && key < end_key;
      const T* from = source + static_cast<int64_t>(block) * p.cache_block_stride + (key & offset_mask) * D + chunk * 8;
      copy_async(slot_byte + Swizzle<S::kChunks>::byte(row, chunk), from, is_valid);
    }
    if (kIsV && (tile + 1) % kTilesPerSplit == 0) load_block_ids(tile + 1);
  }

 private:
  // Of the tile's split. Lane i keeps the ids of blocks i and 32 + i: 64 blocks of the smallest size are a split.
  __device__ __forceinline__ void load_block_ids(int tile) {
    const int first = tile / kTilesPerSplit * kSplitKeys >> item_.p.block_shift;
    const int lane = thread_index() & 31;
    ids_low_ = block_id(first, lane);
    ids_high_ = block_id(first, lane + 32);
  }
  __device__ __forceinline__ int block_id(int first, int index) const {
    const int shift = item_.p.block_shift, block = first + index;
    const bool is_needed = index < kSplitKeys >> shift && block << shift < item_.work().end_key &&
                           (block + 1) << shift > item_.state().first_visible;
    return is_needed ? item_.block_ids()[block] : 0;
  }

  const Item& item_;
  int ids_low_, ids_high_;
};

}  // namespace pagedllm
