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
// What persistent.cu needs of an sm_90a GPU, in PTX (PTX ISA 8.x; no header is included, so that
// NVRTC needs none). test/engine/persistent_host.h is the same interface on a CPU.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;  // its bits

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)

struct alignas(16) Quad { u32 x, y, z, w; };
struct alignas(16) Four { float x, y, z, w; };
struct alignas(8) Two { float x, y; };

extern __shared__ unsigned char arena_[];

DEVICE u32 thread() { return threadIdx.x; }
DEVICE u32 block() { return blockIdx.x; }
/// Address of the dynamic shared memory, rounded up to 1024 bytes as 128-byte swizzles want it.
DEVICE u32 arena() { return ((u32)__cvta_generic_to_shared(arena_) + 1023) & ~1023u; }
DEVICE u64 cycles() { return clock64(); }

/// A wait of a quarter of a second is a defect: end the launch instead of hanging the GPU.
struct Watchdog {
  long long begin = clock64();
  DEVICE void look() { if (clock64() - begin > 400000000ll) __trap(); }
};

/// Registers go from one warpgroup to the others: 2 x 232 + 40 of 512 a lane of four warps.
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }
DEVICE void leave_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void sync_consumers() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
/// Order ordinary accesses to shared memory before those of copy engine and matrix units.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void barrier_init(u32 at, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at), "r"(count) : "memory");
}
DEVICE void barrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");
}
DEVICE void barrier_expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(at), "r"(bytes) : "memory");
}
DEVICE bool barrier_passed(u32 at, u32 parity) {
  u32 passed;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
               " selp.u32 %0, 1, 0, p; }" : "=r"(passed) : "r"(at), "r"(parity) : "memory");
  return passed;
}
DEVICE void barrier_wait(u32 at, u32 parity) {
  if (barrier_passed(at, parity)) return;
  Watchdog dog;
  while (!barrier_passed(at, parity)) dog.look();
}
/// Barriers made by this thread are seen by the copy engine.
DEVICE void barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_async();
}

/// Copy global to shared memory, both 16-byte aligned; read once, so first to leave the L2.
DEVICE u64 streaming() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void copy_once(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1], %2, [%3], %4;"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

/// Copy 16 bytes past the first-level cache, by the load unit and not the copy engine.
DEVICE void copy_piece(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
/// Arrive at a barrier as soon as all pieces that this thread asked for are there.
DEVICE void arrive_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

DEVICE void grid_arrive(u32* counter) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(counter) : "memory");
}
DEVICE void grid_wait(u32* counter, u32 least) {
  if (FREE) return;  // what the barriers cost: a launch without them, whose results are noise
  Watchdog dog;
  u32 seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    dog.look();
  } while (seen < least);
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
DEVICE u32 count_up(u32* counter) { return atomicAdd(counter, 1u); }

// Loads past the first-level cache, of what other blocks wrote in this launch.
DEVICE Four load4(const float* at) {
  Four v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
  return v;
}
DEVICE Two load2(const float* at) {
  Two v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(at));
  return v;
}
DEVICE float load1(const float* at) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at));
  return v;
}
DEVICE Quad load_quad(const void* at) {
  Quad v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
DEVICE u64 load_pair(const void* at) {
  u64 v;
  asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(at));
  return v;
}
DEVICE u32 load_word(const void* at) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}
DEVICE void shared_quad(u32 to, Quad v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void shared_store(u32 to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" :: "r"(to), "f"(v) : "memory");
}
DEVICE float shared_load(u32 at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}

DEVICE float shuffle(float v, u32 lane) { return __shfl_sync(~0u, v, lane); }
DEVICE float shuffle_xor(float v, u32 mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE float root(float v) { return rsqrtf(v); }
DEVICE float power2(float v) { return exp2f(v); }
DEVICE float power_e(float v) { return __expf(v); }
DEVICE float infinity() { return __int_as_float(0x7f800000); }

DEVICE float wide(bf16 bits) { return __uint_as_float((u32)bits << 16); }
/// Two numbers as bf16, rounded to the nearest; low in the low half.
DEVICE u32 narrow2(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

/// Four 8x8 tiles of 16-bit elements; lane i gives the address of row i % 8 of tile i / 8.
DEVICE void load_tiles(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
DEVICE void load_tiles_turned(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
/// d (16 x 8) += a (16 x 16) b (16 x 8) in one warp.
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3},"
      " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Matrix products of a warpgroup, both operands in shared memory, depth contiguous, swizzled by
// 128 bytes: 16-byte piece c of row r of a 64-deep tile lies at piece c ^ (r % 8).
DEVICE u64 operand(u32 at) {
  return (u64)((at & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
DEVICE void matrix_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEVICE void matrix_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
/// d (64 x 16) of a warpgroup = a (64 x 16) b (16 x 16) + d, or without d.
DEVICE void matrix(float (&d)[8], u64 a, u64 b, u32 add) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;"
               " wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"
               " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0; }"
               : R4(0), R4(4) : "l"(a), "l"(b), "r"(add));
}
/// The same of 64 columns.
DEVICE void matrix(float (&d)[32], u64 a, u64 b, u32 add) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;"
               " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16,"
               " %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
               " %32, %33, p, 1, 1, 0, 0; }"
               : R4(0), R4(4), R4(8), R4(12), R4(16), R4(20), R4(24), R4(28)
               : "l"(a), "l"(b), "r"(add));
}
#undef R4
