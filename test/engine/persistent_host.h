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
// The interface of persistent_ptx.cuh on a CPU: every thread of every block is a fiber, which
// yields where a GPU would wait. Which fiber runs next, and when a copy of the copy engine
// lands, is drawn from a seed, so that a missing wait shows as a result that depends on it. Warp
// operations meet in a buffer of their warp; products of a warpgroup read the swizzled tiles
// that their descriptors name, thread by thread.

#include <csetjmp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <ucontext.h>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;
#define DEVICE
#define __grid_constant__
#define KERNEL static void

struct alignas(16) Quad { u32 x, y, z, w; };
struct alignas(16) Four { float x, y, z, w; };
struct alignas(8) Two { float x, y; };

namespace host {
constexpr u32 ARENA = 232448, WARPS = THREADS / 32;
struct Barrier { u32 count = 0, left = 0, phase = 0; long long bytes = 0; };
struct Warp { u64 said[2][32][8]; u32 arrived = 0, turn = 0; };
struct Meeting { u32 arrived = 0, turn = 0; };
struct Block {
  alignas(1024) unsigned char memory[ARENA];
  Barrier barriers[ARENA / 8];
  Warp warps[WARPS];
  Meeting all, consumers, syncs[WARPS];
};
// thread: of a piece, or of an arrival (no bytes) behind its pieces; NOBODY: the copy engine's
constexpr u32 NOBODY = ~0u;
struct Copy { u32 block, to, bytes, barrier; const void* from; u32 thread; };
struct Fiber { ucontext_t start; jmp_buf at; bool begun = false, done = false; u32 block, thread; };
std::vector<Block>* blocks;
std::vector<Fiber>* fibers;
std::vector<Copy> copies;
std::mt19937 chance;
Fiber* now;
jmp_buf scheduler;
u64 steps, polls;

inline Block& mine() { return (*blocks)[now->block]; }
inline void yield() {
  if (!_setjmp(now->at)) _longjmp(scheduler, 1);
}
inline void meet(Meeting& m, u32 count) {
  const u32 turn = m.turn;
  if (++m.arrived == count) { m.arrived = 0; ++m.turn; return; }
  while (m.turn == turn) yield();
}
inline void settle(Barrier& b) {
  if (b.left == 0 && b.bytes == 0) { b.phase ^= 1; b.left = b.count; }
}
inline void land(size_t which) {
  const Copy c = copies[which];
  if (c.bytes == 0)  // an arrival: the oldest pieces of its thread land first
    for (size_t i = 0; i < copies.size(); ++i)
      if (copies[i].bytes && copies[i].thread == c.thread && copies[i].block == c.block) return;
  copies[which] = copies.back();
  copies.pop_back();
  Block& b = (*blocks)[c.block];
  if (c.to % 16 || c.bytes % 16 || (u64)c.from % 16) { std::puts("copy: not aligned"); abort(); }
  if (c.bytes) std::memcpy(b.memory + c.to, c.from, c.bytes);
  if (c.bytes && c.thread != NOBODY) return;
  Barrier& barrier = b.barriers[c.barrier / 8];
  if (c.bytes == 0) --barrier.left;
  barrier.bytes -= c.bytes;
  settle(barrier);
}
/// Deposit a value, wait for the warp, return what all of it said.
inline const u64 (*exchange(const u64* value, u32 words))[8] {
  Warp& w = mine().warps[now->thread / 32];
  const u32 turn = w.turn;
  std::memcpy(w.said[turn & 1][now->thread % 32], value, words * 8);
  if (++w.arrived == 32) { w.arrived = 0; ++w.turn; }
  else while (w.turn == turn) yield();
  return w.said[turn & 1];
}
}  // namespace host

inline u32 thread() { return host::now->thread; }
inline u32 block() { return host::now->block; }
inline u32 arena() { return 0; }
inline u64 cycles() { return host::steps; }
inline void take_registers() {}
inline void leave_registers() {}
inline void sync_block() { host::meet(host::mine().all, THREADS); }
inline void sync_warp() { host::meet(host::mine().syncs[thread() / 32], 32); }
inline void sync_consumers() { host::meet(host::mine().consumers, 256); }
inline void fence_async() {}
inline void barriers_made() {}
inline void barrier_init(u32 at, u32 count) { host::mine().barriers[at / 8] = {count, count, 0, 0}; }
inline void barrier_arrive(u32 at) {
  host::Barrier& b = host::mine().barriers[at / 8];
  --b.left;
  host::settle(b);
}
inline void barrier_expect(u32 at, u32 bytes) {
  host::mine().barriers[at / 8].bytes += bytes;
  barrier_arrive(at);
}
inline void barrier_wait(u32 at, u32 parity) {
  while (host::mine().barriers[at / 8].phase == parity) host::yield();
}
inline u64 streaming() { return 0; }
inline void copy_once(u32 to, const void* from, u32 bytes, u32 barrier, u64) {
  host::copies.push_back({block(), to, bytes, barrier, from, host::NOBODY});
}
inline void copy_piece(u32 to, const void* from) {
  host::copies.push_back({block(), to, 16, 0, from, thread()});
}
inline void arrive_copied(u32 barrier) {
  host::copies.push_back({block(), 0, 0, barrier, nullptr, thread()});
}
inline void grid_arrive(u32* counter) { ++*counter; }
inline void grid_wait(u32* counter, u32 least) { while (*counter < least) host::yield(); }
inline u32 count_up(u32* counter) { return (*counter)++; }

template <class T> T loaded(const void* at) { T v; std::memcpy(&v, at, sizeof v); return v; }
inline Four load4(const float* at) { return loaded<Four>(at); }
inline Two load2(const float* at) { return loaded<Two>(at); }
inline float load1(const float* at) { return *at; }
inline Quad load_quad(const void* at) { return loaded<Quad>(at); }
inline u64 load_pair(const void* at) { return loaded<u64>(at); }
inline u32 load_word(const void* at) { return loaded<u32>(at); }
inline void shared_quad(u32 to, Quad v) { std::memcpy(host::mine().memory + to, &v, 16); }
inline void shared_store(u32 to, float v) { std::memcpy(host::mine().memory + to, &v, 4); }
inline float shared_load(u32 at) { return loaded<float>(host::mine().memory + at); }

inline float as_float(u64 bits) { u32 low = (u32)bits; float v; std::memcpy(&v, &low, 4); return v; }
inline float shuffle(float v, u32 lane) {
  u64 bits = 0;
  std::memcpy(&bits, &v, 4);
  return as_float(host::exchange(&bits, 1)[lane % 32][0]);
}
inline float shuffle_xor(float v, u32 mask) { return shuffle(v, thread() % 32 ^ mask); }
inline float root(float v) { return 1.0f / std::sqrt(v); }
inline float power2(float v) { return std::exp2(v); }
inline float power_e(float v) { return std::exp(v); }
inline float infinity() { return std::numeric_limits<float>::infinity(); }
inline float wide(bf16 bits) { return as_float((u64)bits << 16); }
inline u32 narrow1(float v) {
  u32 bits;
  std::memcpy(&bits, &v, 4);
  if (v != v) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 narrow2(float low, float high) { return narrow1(low) | narrow1(high) << 16; }

inline void tiles(u32 (&r)[4], u32 at, bool turned) {
  u64 mine = at;
  const u64 (*all)[8] = host::exchange(&mine, 1);
  const u32 lane = thread() % 32;
  for (u32 i = 0; i < 4; ++i) {
    u32 two[2];
    for (u32 j = 0; j < 2; ++j) {
      const u32 row = turned ? lane % 4 * 2 + j : lane / 4, col = turned ? lane / 4 : lane % 4 * 2 + j;
      two[j] = loaded<bf16>(host::mine().memory + all[i * 8 + row][0] + col * 2);
    }
    r[i] = two[0] | two[1] << 16;
  }
}
inline void load_tiles(u32 (&r)[4], u32 at) { tiles(r, at, false); }
inline void load_tiles_turned(u32 (&r)[4], u32 at) { tiles(r, at, true); }
inline float half_of(u64 word, u32 which) { return wide((bf16)(word >> 16 * which)); }
inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  u64 said[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const u64 (*all)[8] = host::exchange(said, 6);
  const u32 lane = thread() % 32;
  for (u32 i = 0; i < 4; ++i) {
    const u32 m = lane / 4 + i / 2 * 8, n = lane % 4 * 2 + i % 2;
    float sum = 0.0f;
    for (u32 k = 0; k < 16; ++k) {
      const u64* left = all[m % 8 * 4 + k % 8 / 2];
      const u64* right = all[n * 4 + k % 8 / 2];
      sum += half_of(left[m / 8 + k / 8 * 2], k % 2) * half_of(right[4 + k / 8], k % 2);
    }
    d[i] += sum;
  }
}

inline u64 operand(u32 at) { return at; }
inline void matrix_begin() {}
inline void matrix_commit() {}
template <int LEFT> void matrix_wait() {}
/// Element (r, k) of an operand at `at`: the 128-byte swizzle moves 16-byte pieces by the row,
/// bits 7-9 of the address into bits 4-6.
inline float element(u64 at, u32 r, u32 k) {
  u32 where = (u32)at + r * 128 + k * 2;
  where ^= (where >> 7 & 7) << 4;
  return wide(loaded<bf16>(host::mine().memory + where));
}
template <int N> void matrix(float (&d)[N], u64 a, u64 b, u32 add) {
  const u32 lane = thread() % 32, warp = thread() / 32 % 4;
  for (u32 i = 0; i < N; ++i) {
    const u32 m = warp * 16 + lane / 4 + i % 4 / 2 * 8, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = add ? d[i] : 0.0f;
    for (u32 k = 0; k < 16; ++k) sum += element(a, m, k) * element(b, n, k);
    d[i] = sum;
  }
}

#include "persistent.cu"

namespace host {
Args given;
void enter() {
  persistent(given);
  now->done = true;
  _longjmp(scheduler, 1);
}
}  // namespace host

/// Run a launch; return 0, 1 for a deadlock, 2 for copies left over.
extern "C" int launch(const void* args, u32 seed) {
  using namespace host;
  constexpr size_t STACK = 1 << 16;
  std::memcpy(&given, args, sizeof given);
  std::vector<Block> made(GRID);
  for (Block& b : made) std::memset(b.memory, 0xff, ARENA);  // NaN
  std::vector<Fiber> all(GRID * THREADS);
  unsigned char* stacks = (unsigned char*)std::malloc(all.size() * STACK);
  blocks = &made;
  fibers = &all;
  chance.seed(seed);
  copies.clear();
  steps = 0;
  std::vector<u32> running;
  for (u32 i = 0; i < all.size(); ++i) {
    all[i].block = i / THREADS;
    all[i].thread = i % THREADS;
    getcontext(&all[i].start);
    all[i].start.uc_stack.ss_sp = stacks + i * STACK;
    all[i].start.uc_stack.ss_size = STACK;
    makecontext(&all[i].start, enter, 0);
    running.push_back(i);
  }
  int result = 0;
  while (!running.empty() && result == 0) {
    // whole warps take turns from a random place on, so that lanes meet soon
    const size_t first = chance() % running.size() & ~31ull, count = running.size();
    for (size_t i = 0; i < count; ++i) {
      now = &all[running[(first + i) % count]];
      if (now->done) continue;
      if (!_setjmp(scheduler)) {
        if (now->begun) _longjmp(now->at, 1);
        now->begun = true;
        setcontext(&now->start);
      }
      if (!copies.empty() && chance() % 64 == 0) land(chance() % copies.size());
    }
    for (size_t n = copies.size() / 2; n; --n) land(chance() % copies.size());
    if (copies.size() == 1) land(0);
    std::vector<u32> left;
    for (u32 i : running) if (!all[i].done) left.push_back(i);
    running.swap(left);
    if (++steps > 400000) result = 1;
  }
  if (result == 0 && !copies.empty()) result = 2;
  std::free(stacks);
  return result;
}
