// Copyright 2026 rspec_planner authors
//
// Licensed under the Apache License, Version 2.0 (the "License");
// you may not use this file except in compliance with the License.
// You may obtain a copy of the License at
//
//     http://www.apache.org/licenses/LICENSE-2.0
//
// Unless required by applicable law or agreed to in writing, software
// distributed under the License is distributed on an "AS IS" BASIS,
// WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
// See the License for the specific language governing permissions and
// limitations under the License.
//
// All decoder layers over a few rows in one launch, one block on every multiprocessor.
//
// One warp streams the block's weights and its share of the KV cache, both constant during the
// launch, through a ring of shared memory and never waits for other blocks; a second warp brings
// the rows, as soon as the blocks that make them are through; eight warps multiply. Weights come
// by the copy engine and rows by the load unit, so that rows do not queue behind a ring of
// weights. Between two phases lies a barrier of the grid, which the ring bridges. Nine phases a
// layer:
//   qkv product | norm, rotary, K/V write | attention in parts | join | out product |
//   sum, residual, norm | gate and up product, SwiGLU | down product | sum, residual, norm
// Parts of a product are added in their order by who reads them, never by atomics, so that the
// result does not depend on timing. Rows take the same way whatever their number: a tile always
// holds ROWS of them, and keys are cut by their absolute position.
//
// Sizes are macros, see persistent.py. A product's weights are tiles of C x 64, swizzled; rows
// that a product reads lie as tiles of ROWS x 64, swizzled likewise (`spot`).

constexpr u32 D = 128, KEY_ROW = D * 2 + 16;  // bytes of a key in shared memory: no bank twice
constexpr u32 GROUP = HEADS / KV, QUERIES = ROWS * GROUP, CONSUMERS = 8;
constexpr u32 QUERY_TILES = QUERIES / 16, KEY_GROUPS = CONSUMERS / QUERY_TILES;
constexpr u32 KEY_PARTS = PARTS * KEY_GROUPS, QKV_HEADS = HEADS + 2 * KV;
constexpr u32 ROW_TILE = ROWS * 128, FAR = 0xffffffff;
static_assert(QUERIES % 16 == 0 && CONSUMERS % QUERY_TILES == 0 && KEY_PARTS <= 32
              && (KEY_PARTS < 16 || KEY_PARTS % 16 == 0), "queries");
static_assert(KV * PARTS <= GRID && KEYS % 16 == 0 && HIDDEN % 64 == 0, "grid");

template <int COLUMNS, int DEPTH, int WIDE, int SPLIT>
struct Product {
  static constexpr u32 C = WIDE, TILES = COLUMNS / WIDE, DEEP = DEPTH / 64, S = SPLIT;
  static constexpr u32 UNITS = TILES * S, BYTES = C * 128, N = COLUMNS;
  static_assert(COLUMNS % WIDE == 0 && DEPTH % 64 == 0 && WIDE % 64 == 0 && WIDE <= 192, "tile");
  static_assert(UNITS <= GRID && S <= DEEP && BYTES <= SLOT, "units");
  DEVICE static u32 first(u32 part) { return part * DEEP / S; }
};
using Qkv = Product<QKV_HEADS * D, HIDDEN, QKV_C, QKV_S>;
using Out = Product<HIDDEN, HEADS * D, OUT_C, OUT_S>;
using Up = Product<2 * INTER, HIDDEN, UP_C, 1>;
using Down = Product<HIDDEN, INTER, DOWN_C, DOWN_S>;

struct Layer {
  const unsigned char *qkv, *out, *up, *down;
  const bf16 *input_norm, *post_norm, *q_norm, *k_norm;
  bf16 *keys, *values;  // (KV, capacity, D)
  bf16* tap;            // receives the layer's output too, or null
};

struct Args {  // every field has eight bytes
  const Layer* layers;
  bf16 *hidden, *middle;                  // (ROWS, HIDDEN)
  unsigned char *normed, *mixed, *gated;  // tiles of rows
  float* parts;                           // (S, ROWS, N)
  bf16* q;                                // (ROWS, HEADS, D)
  float *peak, *total, *seen;             // (KEY_PARTS, KV, QUERIES), the last one times D
  const float *cos, *sin;                 // (positions, D / 2)
  const long long *context, *angle;       // rows of the cache that are there; first rotary row
  bf16 *own_keys, *own_values;            // (KV, ROWS, D), where not CAUSAL
  u32* counters;                          // [0] arrivals at barriers, [1] blocks at their end
  u64* trace;                             // TRACE: five cycle counts a phase of block 0
  u64 count, rows, head_stride, tap_stride;  // layers; rows in use; elements of a KV head
  double eps, scale;
};

struct Ring {
  u32 base, size, barriers, slots, at, turn;
  DEVICE Ring(u32 base, u32 size, u32 barriers, u32 slots)
      : base(base), size(size), barriers(barriers), slots(slots), at(0), turn(0) {}
  DEVICE u32 slot() const { return base + at * size; }
  DEVICE u32 full() const { return barriers + at * 8; }
  DEVICE u32 empty() const { return barriers + (slots + at) * 8; }
  DEVICE void wait_full() const { barrier_wait(full(), turn); }
  DEVICE void wait_empty() const { barrier_wait(empty(), turn ^ 1); }
  DEVICE void next() {
    if (++at == slots) { at = 0; turn ^= 1; }
  }
};

/// Byte of an element of a product's rows.
DEVICE u32 spot(u32 row, u32 column) {
  return column / 64 * ROW_TILE + row * 128 + (((column % 64 / 8) ^ (row & 7)) * 16) + column % 8 * 2;
}

struct Keys {  // of one block's share of the cache
  u32 context, head, part, tiles, own;
  DEVICE Keys(const Args& a)
      : context((u32)*a.context), head(block() / PARTS), part(block() % PARTS) {
    own = CAUSAL ? FAR : (context + KEYS - 1) / KEYS;  // first tile of the rows' own keys
    tiles = CAUSAL ? (context + (u32)a.rows + KEYS - 1) / KEYS : own + (ROWS + KEYS - 1) / KEYS;
    if (block() >= KV * PARTS) tiles = 0;
  }
  DEVICE static u32 within(u32 end, u32 begin) {
    return end <= begin ? 0 : end - begin < KEYS ? end - begin : KEYS;
  }
  /// Keys of a tile that were there before the launch, and all of them.
  DEVICE u32 old(u32 tile) const { return tile >= own ? 0 : within(context, tile * KEYS); }
  DEVICE u32 all(u32 tile, u32 rows) const {
    return CAUSAL ? within(context + rows, tile * KEYS)
                  : tile >= own ? within(ROWS, (tile - own) * KEYS) : old(tile);
  }
};

template <class P>
DEVICE void stream_weights(const unsigned char* weights, Ring& ring, u64 policy, u32 lane) {
  if (block() >= P::UNITS) return;
  const u32 tile = block() % P::TILES, part = block() / P::TILES;
  const unsigned char* from = weights + (u64)tile * P::DEEP * P::BYTES;
  for (u32 deep = P::first(part); deep < P::first(part + 1); ++deep, ring.next()) {
    if (lane) continue;
    ring.wait_empty();
    barrier_expect(ring.full(), P::BYTES);
    copy_once(ring.slot(), from + (u64)deep * P::BYTES, P::BYTES, ring.full(), policy);
  }
}

DEVICE void stream_keys(const Args& a, const Layer& layer, const Keys& keys, Ring& ring,
                        u64 policy, u32 lane) {
  for (u32 tile = keys.part; tile < keys.tiles; tile += PARTS) {
    const u32 rows = keys.old(tile);
    for (u32 value = 0; value < 2; ++value, ring.next()) {
      const bf16* from = (value ? layer.values : layer.keys) + keys.head * a.head_stride
                         + (u64)tile * KEYS * D;
      if (lane == 0) {
        ring.wait_empty();
        barrier_expect(ring.full(), rows * D * 2);
      }
      sync_warp();
      for (u32 row = lane; row < rows; row += 32)
        copy_once(ring.slot() + row * KEY_ROW, from + row * D, D * 2, ring.full(), policy);
    }
  }
}

template <class P>
DEVICE void stream_rows(const Args& a, const unsigned char* from, u32 barriers, Ring& ring,
                        u32 lane) {
  if (block() >= P::UNITS) return;
  if (lane == 0) grid_wait(a.counters, barriers * GRID);
  sync_warp();
  const u32 part = block() / P::TILES;
  for (u32 deep = P::first(part); deep < P::first(part + 1); ++deep, ring.next()) {
    ring.wait_empty();
#pragma unroll
    for (u32 at = 0; at < ROW_TILE; at += 512)
      copy_piece(ring.slot() + at + lane * 16, from + (u64)deep * ROW_TILE + at + lane * 16);
    arrive_copied(ring.full());
  }
}

struct Consumer {
  const Args& a;
  Ring weights, rows;
  const Keys& keys;
  u32 tid, lane, warp, scratch, barriers, marks;
  u64 entered, ready, stalled, hungry;

  DEVICE Consumer(const Args& a, Ring weights, Ring rows, const Keys& keys, u32 scratch)
      : a(a), weights(weights), rows(rows), keys(keys), tid(thread()), lane(thread() % 32),
        warp(thread() / 32), scratch(scratch), barriers(0), marks(0), entered(0), ready(0),
        stalled(0), hungry(0) {}

  DEVICE bool traced() const { return TRACE && tid == 0 && block() == 0; }
  DEVICE void enter() { if (traced()) { entered = ready = cycles(); stalled = hungry = 0; } }

  /// Wait until all blocks are through the phases before this one.
  DEVICE void wait() {
    enter();
    if (tid == 0) grid_wait(a.counters, barriers * GRID);
    sync_consumers();
    if (traced()) ready = cycles();
  }

  /// End a phase, whose results any block may then read.
  DEVICE void arrive() {
    sync_consumers();
    if (tid == 0) grid_arrive(a.counters);
    ++barriers;
    if (traced()) {
      u64* mark = a.trace + 5 * marks++;
      mark[0] = entered; mark[1] = ready; mark[2] = cycles(); mark[3] = stalled;
      mark[4] = hungry;
    }
  }

  DEVICE void release(u32 empty) { if (lane == 0) barrier_arrive(empty); }

  template <class P, bool GATED> DEVICE void product() {
    if (block() >= P::UNITS) {
      wait();
    } else {
      enter();
      constexpr u32 BLOCKS = P::C / 64;
      if (BLOCKS == 1 && warp >= 4) follow<P>();
      else if (warp < 4) multiply_tile<P, GATED, (BLOCKS + 1) / 2>(0);
      else multiply_tile<P, GATED, BLOCKS / 2 ? BLOCKS / 2 : 1>(1);
    }
    arrive();
  }

  /// Pass a product by, whose tile has no rows for this warpgroup.
  template <class P> DEVICE void follow() {
    const u32 part = block() / P::TILES;
    for (u32 deep = P::first(part); deep < P::first(part + 1); ++deep) {
      weights.wait_full();
      rows.wait_full();
      release(weights.empty());
      release(rows.empty());
      weights.next();
      rows.next();
    }
  }

  /// Multiply rows base, base + 2 .. of 64 of this block's tile, and hand the results out.
  template <class P, bool GATED, int B> DEVICE void multiply_tile(u32 base) {
    const u32 tile = block() % P::TILES, part = block() / P::TILES;
    const u32 first = P::first(part), last = P::first(part + 1);
    float d[B][ROWS / 2];
    u32 free_weights = 0, free_rows = 0;
    for (u32 deep = first; deep < last; ++deep) {
      if (traced() && deep == first) { rows.wait_full(); ready = cycles(); }
      u64 begin = 0;
      if (traced()) begin = cycles();
      weights.wait_full();
      if (traced()) stalled += cycles() - begin;
      if (traced()) begin = cycles();
      rows.wait_full();
      if (traced()) hungry += cycles() - begin;
      fence_async();  // rows were written by ordinary means, and matrix units read otherwise
      matrix_begin();
#pragma unroll
      for (u32 k = 0; k < 4; ++k)
#pragma unroll
        for (u32 b = 0; b < B; ++b)
          matrix(d[b], operand(weights.slot() + (base + 2 * b) * 8192 + k * 32),
                 operand(rows.slot() + k * 32), deep > first || k > 0);
      matrix_commit();
      if (deep > first) {
        matrix_wait<1>();
        release(free_weights);
        release(free_rows);
      }
      free_weights = weights.empty();
      free_rows = rows.empty();
      weights.next();
      rows.next();
    }
    matrix_wait<0>();
    release(free_weights);
    release(free_rows);
#pragma unroll
    for (u32 b = 0; b < B; ++b)
      if (GATED) gate(d[b], (tile * (P::C / 64) + base + 2 * b) * 32);
      else hand_in(d[b], (u64)part * ROWS * P::N, P::N, (tile * (P::C / 64) + base + 2 * b) * 64);
  }

  /// Store a part of a product: 64 columns from `column` on of all rows.
  DEVICE void hand_in(const float (&d)[ROWS / 2], u64 part, u32 columns, u32 column) {
    float* to = a.parts + part + column + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (u32 i = 0; i < ROWS / 2; ++i) {
      const u32 row = i / 4 * 8 + lane % 4 * 2 + i % 2;
      to[row * columns + i % 4 / 2 * 8] = d[i];
    }
  }

  /// Store silu(gate) * up; 8 rows of gate and 8 of up alternate in a tile of weights.
  DEVICE void gate(const float (&d)[ROWS / 2], u32 column) {
    column += warp % 4 * 8 + lane / 4;
    const bool odd = column % 2;
#pragma unroll
    for (u32 i = 0; i < ROWS / 2; i += 4) {  // two rows; neighbours swap, to store two columns
      const float even_row = d[i] / (1.0f + power_e(-d[i])) * d[i + 2];
      const float odd_row = d[i + 1] / (1.0f + power_e(-d[i + 1])) * d[i + 3];
      const float other = shuffle_xor(odd ? even_row : odd_row, 4);
      const u32 row = i * 2 + lane % 4 * 2 + odd;
      *(u32*)(a.gated + spot(row, column & ~1u)) =
          odd ? narrow2(other, odd_row) : narrow2(even_row, other);
    }
  }

  /// Sum of the parts of a product and the residual to `to`, and its norm to `normed`.
  template <u32 S> DEVICE void gather(const bf16* residual, bf16* to, bf16* tap,
                                      const bf16* norm) {
    for (u32 row = block(); row < ROWS; row += GRID) {
      constexpr u32 EACH = (HIDDEN + 1023) / 1024;
      Four v[EACH];
      u64 kept[EACH], factors[EACH];
      float squares = 0.0f;
#pragma unroll
      for (u32 i = 0; i < EACH; ++i) {
        const u32 column = (i * 256 + tid) * 4;
        v[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (column >= HIDDEN) continue;
        factors[i] = norm ? *(const u64*)(norm + column) : 0;
        const u64 old = load_pair(residual + row * HIDDEN + column);
        Four part[S ? S : 1];
#pragma unroll
        for (u32 s = 0; s + 1 <= S; ++s)
          part[s] = load4(a.parts + ((u64)s * ROWS + row) * HIDDEN + column);
#pragma unroll
        for (u32 s = 0; s + 1 <= S; ++s) {
          v[i].x += part[s].x; v[i].y += part[s].y; v[i].z += part[s].z; v[i].w += part[s].w;
        }
        v[i].x += wide((bf16)old); v[i].y += wide((bf16)(old >> 16));
        v[i].z += wide((bf16)(old >> 32)); v[i].w += wide((bf16)(old >> 48));
        kept[i] = narrow2(v[i].x, v[i].y) | (u64)narrow2(v[i].z, v[i].w) << 32;
        if (S) *(u64*)(to + row * HIDDEN + column) = kept[i];
        if (S && tap && row < a.rows) *(u64*)(tap + row * a.tap_stride + column) = kept[i];
        v[i] = {wide((bf16)kept[i]), wide((bf16)(kept[i] >> 16)), wide((bf16)(kept[i] >> 32)),
                wide((bf16)(kept[i] >> 48))};
        squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
      }
      if (norm) {
        const float factor = root(sum(squares, row / GRID % 2) / HIDDEN + (float)a.eps);
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
          const u32 column = (i * 256 + tid) * 4;
          if (column >= HIDDEN) continue;
          const u64 w = factors[i];
          const u32 low = narrow2(v[i].x * factor * wide((bf16)w),
                                  v[i].y * factor * wide((bf16)(w >> 16)));
          const u32 high = narrow2(v[i].z * factor * wide((bf16)(w >> 32)),
                                   v[i].w * factor * wide((bf16)(w >> 48)));
          *(u64*)(a.normed + spot(row, column)) = low | (u64)high << 32;
        }
      }
    }
    arrive();
  }

  DEVICE float warp_sum(float v) {
#pragma unroll
    for (u32 mask = 16; mask; mask /= 2) v += shuffle_xor(v, mask);
    return v;
  }
  /// Sum over the consumers, in a fixed order; two sums behind each other take two places.
  DEVICE float sum(float v, u32 place) {
    const u32 at = scratch + place * CONSUMERS * 4;
    v = warp_sum(v);
    if (lane == 0) shared_store(at + warp * 4, v);
    sync_consumers();
    float all = 0.0f;
#pragma unroll
    for (u32 i = 0; i < CONSUMERS; ++i) all += shared_load(at + i * 4);
    return all;
  }

  /// What turns a row of a head, constant during the launch; low and high half of the head.
  struct Turn {
    u32 low_norm, high_norm;
    Two cos, sin;
  };
  DEVICE Turn turn_of(const Layer& layer, u32 item) {
    const u32 row = item / QKV_HEADS, head = item % QKV_HEADS, dim = lane * 2;
    if (row >= ROWS || head >= HEADS + KV) return {0, 0, {0.0f, 0.0f}, {0.0f, 0.0f}};
    const bf16* norm = head < HEADS ? layer.q_norm : layer.k_norm;
    const long long at = *a.angle + row;
    const u64 from = (u64)(at < 0 ? 0 : at) * 64 + dim;
    return {*(const u32*)(norm + dim), *(const u32*)(norm + dim + 64), *(const Two*)(a.cos + from),
            *(const Two*)(a.sin + from)};
  }

  /// Norm and turn queries and keys, put keys and values where the attention reads them.
  DEVICE void rotate(const Layer& layer) {
    const u32 dim = lane * 2;
    u32 item = block() * CONSUMERS + warp;
    Turn turn = turn_of(layer, item);  // fetched while others are still at the product
    wait();
    for (; item < ROWS * QKV_HEADS; item += GRID * CONSUMERS) {
      const u32 row = item / QKV_HEADS, head = item % QKV_HEADS;
      const float* from = a.parts + row * Qkv::N + head * D + dim;
      Two x[Qkv::S], y[Qkv::S];
#pragma unroll
      for (u32 s = 0; s < Qkv::S; ++s) {
        x[s] = load2(from + (u64)s * ROWS * Qkv::N);
        y[s] = load2(from + (u64)s * ROWS * Qkv::N + D / 2);
      }
      const Turn next = turn_of(layer, item + GRID * CONSUMERS);
      Two low = x[0], high = y[0];
#pragma unroll
      for (u32 s = 1; s < Qkv::S; ++s) {
        low.x += x[s].x; low.y += x[s].y; high.x += y[s].x; high.y += y[s].y;
      }
      bf16* to = a.q + (row * HEADS + head) * D;
      bool kept = true;
      if (head >= HEADS) {  // past the queries: keys, then values
        const u32 kv = (head - HEADS) % KV;
        const bool key = head < HEADS + KV;
        kept = row < a.rows;
        to = CAUSAL ? (key ? layer.keys : layer.values) + kv * a.head_stride
                          + (u64)(keys.context + row) * D
                    : (key ? a.own_keys : a.own_values) + (kv * ROWS + row) * D;
      }
      if (head < HEADS + KV) {
        const float all = warp_sum(low.x * low.x + low.y * low.y + high.x * high.x
                                   + high.y * high.y);
        const float factor = root(all / D + (float)a.eps);
        low.x *= factor * wide((bf16)turn.low_norm);
        low.y *= factor * wide((bf16)(turn.low_norm >> 16));
        high.x *= factor * wide((bf16)turn.high_norm);
        high.y *= factor * wide((bf16)(turn.high_norm >> 16));
        const Two turned = {low.x * turn.cos.x - high.x * turn.sin.x,
                            low.y * turn.cos.y - high.y * turn.sin.y};
        high = {high.x * turn.cos.x + low.x * turn.sin.x, high.y * turn.cos.y + low.y * turn.sin.y};
        low = turned;
      }
      if (kept) {
        *(u32*)(to + dim) = narrow2(low.x, low.y);
        *(u32*)(to + dim + 64) = narrow2(high.x, high.y);
      }
      turn = next;
    }
    arrive();
  }

  /// Put the keys and values of this launch into a tile, and zeros behind the last one.
  DEVICE void complete(const Layer& layer, u32 tile, u32 old, u32 all, u32 k, u32 v) {
    const bf16 *fresh_k = layer.keys + keys.head * a.head_stride + (u64)tile * KEYS * D;
    const bf16 *fresh_v = layer.values + keys.head * a.head_stride + (u64)tile * KEYS * D;
    if (!CAUSAL && tile >= keys.own) {
      fresh_k = a.own_keys + (keys.head * ROWS + (tile - keys.own) * KEYS) * D;
      fresh_v = a.own_values + (keys.head * ROWS + (tile - keys.own) * KEYS) * D;
    }
    constexpr u32 EACH = KEYS / 16;
    Quad got[2 * EACH];  // all asked for before the first is waited for
#pragma unroll
    for (u32 j = 0; j < EACH; ++j) {
      const u32 i = old * 16 + tid + j * 256, row = i / 16;
      const Quad zero = {0, 0, 0, 0};
      const bool there = row < all;
      got[2 * j] = there ? load_quad(fresh_k + row * D + i % 16 * 8) : zero;
      got[2 * j + 1] = there ? load_quad(fresh_v + row * D + i % 16 * 8) : zero;
    }
#pragma unroll
    for (u32 j = 0; j < EACH; ++j) {
      const u32 i = old * 16 + tid + j * 256, at = i / 16 * KEY_ROW + i % 16 * 16;
      if (i >= KEYS * 16) continue;
      shared_quad(k + at, got[2 * j]);
      shared_quad(v + at, got[2 * j + 1]);
    }
    fence_async();  // the copy engine writes here next
    sync_consumers();
  }

  /// What the queries of one KV head see in one part of the keys: split-KV, 16 queries a warp.
  DEVICE void attend(const Layer& layer) {
    wait();
    const u32 query = warp % QUERY_TILES * 16 + lane / 4, mine = warp / QUERY_TILES;
    u32 q[8][4];
    float o[16][4], high[2], weight[2] = {0.0f, 0.0f};
    high[0] = high[1] = -infinity();
    if (block() < KV * PARTS) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const u32 r = query + i % 2 * 8, head = keys.head * GROUP + r % GROUP;
        const bf16* from = a.q + (r / GROUP * HEADS + head) * D + lane % 4 * 2 + i / 2 * 8;
#pragma unroll
        for (u32 k = 0; k < 8; ++k) q[k][i] = load_word(from + k * 16);
      }
#pragma unroll
      for (u32 n = 0; n < 16; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    }
    for (u32 tile = keys.part, turn = 0; tile < keys.tiles; tile += PARTS, ++turn) {
      const u32 old = keys.old(tile), all = keys.all(tile, (u32)a.rows);
      u64 begin = 0;
      if (traced()) begin = cycles();
      weights.wait_full();
      const u32 k_slot = weights.slot(), k_empty = weights.empty();
      weights.next();
      weights.wait_full();
      if (traced()) stalled += cycles() - begin;
      if (old < KEYS) complete(layer, tile, old, all, k_slot, weights.slot());
      if (turn % KEY_GROUPS == mine) {
        u32 limit[2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i)
          limit[i] = CAUSAL ? Keys::within(keys.context + (query + i * 8) / GROUP + 1, tile * KEYS)
                            : all;
        scan(q, o, high, weight, limit, k_slot, weights.slot());
      }
      sync_warp();
      release(k_empty);
      release(weights.empty());
      weights.next();
    }
    if (block() < KV * PARTS) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const u64 place = ((u64)(keys.part * KEY_GROUPS + mine) * KV + keys.head) * QUERIES
                          + query + i * 8;
        weight[i] += shuffle_xor(weight[i], 1);
        weight[i] += shuffle_xor(weight[i], 2);
        if (lane % 4 == 0) { a.peak[place] = high[i]; a.total[place] = weight[i]; }
#pragma unroll
        for (u32 n = 0; n < 16; ++n)
          *(Two*)(a.seen + place * D + n * 8 + lane % 4 * 2) = {o[n][2 * i], o[n][2 * i + 1]};
      }
    }
    arrive();
  }

  /// Take one tile of keys and values into peak, weight and unnormalised result.
  DEVICE void scan(const u32 (&q)[8][4], float (&o)[16][4], float (&high)[2],
                   float (&weight)[2], const u32 (&limit)[2], u32 k_slot, u32 v_slot) {
    float s[KEYS / 8][4];
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (u32 k = 0; k < 8; k += 2)  // keys inside: their sums do not wait for one another
#pragma unroll
      for (u32 n = 0; n < KEYS / 8; ++n) {
        u32 b[4];
        load_tiles(b, k_slot + (n * 8 + lane % 8) * KEY_ROW + lane / 8 * 16 + k * 32);
        multiply(s[n], q[k], b[0], b[1]);
        multiply(s[n], q[k + 1], b[2], b[3]);
      }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      float top = high[i];
#pragma unroll
      for (u32 n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (u32 j = 2 * i; j < 2 * i + 2; ++j) {
          const bool seen = n * 8 + lane % 4 * 2 + j % 2 < limit[i];
          s[n][j] = seen ? s[n][j] * (float)a.scale : -infinity();
          top = top < s[n][j] ? s[n][j] : top;
        }
      float other = shuffle_xor(top, 1);
      top = top < other ? other : top;
      other = shuffle_xor(top, 2);
      top = top < other ? other : top;
      const float safe = top == -infinity() ? 0.0f : top, fade = power2(high[i] - safe);
      weight[i] *= fade;
      high[i] = top;
#pragma unroll
      for (u32 n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (u32 j = 2 * i; j < 2 * i + 2; ++j) {
          s[n][j] = power2(s[n][j] - safe);
          weight[i] += s[n][j];
        }
#pragma unroll
      for (u32 n = 0; n < 16; ++n) { o[n][2 * i] *= fade; o[n][2 * i + 1] *= fade; }
    }
#pragma unroll
    for (u32 k = 0; k < KEYS / 16; ++k) {
      const u32 p[4] = {narrow2(s[2 * k][0], s[2 * k][1]), narrow2(s[2 * k][2], s[2 * k][3]),
                        narrow2(s[2 * k + 1][0], s[2 * k + 1][1]),
                        narrow2(s[2 * k + 1][2], s[2 * k + 1][3])};
      const u32 from = v_slot + (k * 16 + lane % 16) * KEY_ROW + lane / 16 * 16;
#pragma unroll
      for (u32 n = 0; n < 16; n += 2) {
        u32 b[4];
        load_tiles_turned(b, from + n * 16);
        multiply(o[n], p, b[0], b[1]);
        multiply(o[n + 1], p, b[2], b[3]);
      }
    }
  }

  /// Join the parts by their log-sum-exp.
  DEVICE void join() {
    wait();
    for (u32 item = block() * CONSUMERS + warp; item < ROWS * HEADS; item += GRID * CONSUMERS) {
      const u32 row = item / HEADS, head = item % HEADS;
      const u64 place = (u64)(head / GROUP) * QUERIES + row * GROUP + head % GROUP;
      constexpr u64 STRIDE = (u64)KV * QUERIES;
      const bool mine = lane < KEY_PARTS;
      const float peak = mine ? load1(a.peak + place + lane * STRIDE) : -infinity();
      const float total = mine ? load1(a.total + place + lane * STRIDE) : 0.0f;
      constexpr u32 STEP = KEY_PARTS < 16 ? KEY_PARTS : 16;
      Four part[STEP];  // of all parts, used or not: nothing waits for the peaks
#pragma unroll
      for (u32 p = 0; p < STEP; ++p)
        part[p] = load4(a.seen + (place + p * STRIDE) * D + lane * 4);
      float top = peak;
#pragma unroll
      for (u32 mask = 16; mask; mask /= 2) {
        const float other = shuffle_xor(top, mask);
        top = top < other ? other : top;
      }
      const float factor = peak > -infinity() ? power2(peak - top) : 0.0f;
      const float weight = warp_sum(factor * total);
      Four v = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (u32 first = 0; first < KEY_PARTS; first += STEP) {
#pragma unroll
        for (u32 p = 0; p < STEP; ++p) {
          const float f = shuffle(factor, first + p);
          v.x += part[p].x * f; v.y += part[p].y * f; v.z += part[p].z * f; v.w += part[p].w * f;
          if (first + STEP < KEY_PARTS)
            part[p] = load4(a.seen + (place + (first + STEP + p) * STRIDE) * D + lane * 4);
        }
      }
      *(u64*)(a.mixed + spot(row, head * D + lane * 4)) =
          narrow2(v.x / weight, v.y / weight) | (u64)narrow2(v.z / weight, v.w / weight) << 32;
    }
    arrive();
  }

  DEVICE void run() {
    enter();
    gather<0>(a.hidden, a.hidden, nullptr, a.layers[0].input_norm);
    for (u32 index = 0; index < a.count; ++index) {
      const Layer& layer = a.layers[index];
      product<Qkv, false>();
      rotate(layer);
      attend(layer);
      join();
      product<Out, false>();
      wait();
      gather<Out::S>(a.hidden, a.middle, nullptr, layer.post_norm);
      product<Up, true>();
      product<Down, false>();
      wait();
      gather<Down::S>(a.middle, a.hidden, layer.tap,
                      index + 1 < a.count ? a.layers[index + 1].input_norm : nullptr);
    }
    if (tid == 0 && count_up(a.counters + 1) == GRID - 1)  // the last block: nobody waits
      a.counters[0] = a.counters[1] = 0;
  }
};

KERNEL persistent(const __grid_constant__ Args a) {
  const u32 base = arena(), rows_at = base + WEIGHT_SLOTS * SLOT;
  const u32 bars = rows_at + ROW_SLOTS * ROW_TILE, scratch = bars + 16 * (WEIGHT_SLOTS + ROW_SLOTS);
  Ring weights(base, SLOT, bars, WEIGHT_SLOTS);
  Ring rows(rows_at, ROW_TILE, bars + 16 * WEIGHT_SLOTS, ROW_SLOTS);
  const Keys keys(a);
  if (thread() == 0) {
    for (u32 i = 0; i < WEIGHT_SLOTS + ROW_SLOTS; ++i) {
      const bool of_rows = i >= WEIGHT_SLOTS;
      const u32 at = of_rows ? rows.barriers + (i - WEIGHT_SLOTS) * 8 : weights.barriers + i * 8;
      barrier_init(at, of_rows ? 32 : 1);
      barrier_init(at + (of_rows ? ROW_SLOTS : WEIGHT_SLOTS) * 8, CONSUMERS);
    }
    barriers_made();
  }
  sync_block();
  const u32 warp = thread() / 32, lane = thread() % 32;
  if (warp < CONSUMERS) {
    take_registers();
    Consumer(a, weights, rows, keys, scratch).run();
    return;
  }
  leave_registers();
  if (warp == CONSUMERS) {
    const u64 policy = streaming();
    for (u32 index = 0; index < a.count; ++index) {
      const Layer& layer = a.layers[index];
      stream_weights<Qkv>(layer.qkv, weights, policy, lane);
      stream_keys(a, layer, keys, weights, policy, lane);
      stream_weights<Out>(layer.out, weights, policy, lane);
      stream_weights<Up>(layer.up, weights, policy, lane);
      stream_weights<Down>(layer.down, weights, policy, lane);
    }
  } else if (warp == CONSUMERS + 1) {
    for (u32 index = 0; index < a.count; ++index) {
      const u32 before = 1 + 9 * index;
      stream_rows<Qkv>(a, a.normed, before, rows, lane);
      stream_rows<Out>(a, a.mixed, before + 4, rows, lane);
      stream_rows<Up>(a, a.normed, before + 6, rows, lane);
      stream_rows<Down>(a, a.gated, before + 7, rows, lane);
    }
  }
}
