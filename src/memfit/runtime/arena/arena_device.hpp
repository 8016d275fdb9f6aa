// The device under arena.cpp: two pools that serve any size (cudaMallocFromPoolAsync), and arenas (cudaMalloc).
//
// What a step allocates outside its arena comes from a pool of its own: memory that stays (parameters, optimizer state) would
// otherwise settle between blocks of the recorded first step and keep their chunks from being given back.
//
// With MEMFIT_MALLOC both are the heap, so that the bookkeeping is tested on a CPU.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#ifndef MEMFIT_MALLOC
#include <dlfcn.h>
#endif

namespace {

using Stream = void*;
constexpr size_t kBlock = 512;             // every size is a multiple, so every address is one too
constexpr size_t kPage = size_t(2) << 20;  // what the driver rounds an arena to
constexpr int kMaxDevices = 64;
enum Pool { kLasting = 0, kScratch = 1 };

#ifdef MEMFIT_MALLOC

size_t heap_limit = SIZE_MAX, heap_used = 0;  // lets tests run out of memory

void* heap_take(size_t size) {
  if (heap_used + size > heap_limit) return nullptr;
  heap_used += size;
  return std::aligned_alloc(kBlock, size);
}
void* pool_take(Pool, size_t size, int, Stream) { return heap_take(size); }
void pool_give(void* p, size_t size, int, Stream) { heap_used -= size; std::free(p); }
void pool_trim(Pool, int) {}
size_t pool_bytes(Pool, int, size_t live) { return live; }
void* arena_take(size_t size, int) { return heap_take(size); }
void arena_give(void* p, size_t size, int) { heap_used -= size; std::free(p); }
void wait_for(Stream, int) {}
size_t total_bytes(int) { return heap_limit; }

#else

// The few functions of the CUDA runtime that are used, looked up in the library torch has loaded: no headers are needed.
struct Runtime {
  int (*get_device)(int*);
  int (*set_device)(int);
  int (*malloc_async)(void**, size_t, void*, Stream);
  int (*free_async)(void*, Stream);
  int (*malloc_now)(void**, size_t);
  int (*free_now)(void*);
  int (*create_pool)(void**, const void*);
  int (*set_attribute)(void*, int, void*);
  int (*get_attribute)(void*, int, void*);
  int (*trim_to)(void*, size_t);
  int (*stream_wait)(Stream);
  int (*device_wait)();
  int (*last_error)();
  int (*memory_info)(size_t*, size_t*);
};
Runtime cuda{};
constexpr int kReleaseThreshold = 4, kReservedNow = 5;  // cudaMemPoolAttr

struct OnDevice {  // frees may come while another device is current
  int before = 0, wanted;
  explicit OnDevice(int device) : wanted(device) {
    cuda.get_device(&before);
    if (before != wanted) cuda.set_device(wanted);
  }
  ~OnDevice() { if (before != wanted) cuda.set_device(before); }
};

struct PoolProperties {  // cudaMemPoolProps, with room for fields of later versions, all zero
  int allocation_type = 1, handle_types = 0, location_type = 1, device = 0;  // pinned, none, a device
  unsigned char rest[240] = {};
};

void* pool_of(Pool which, int device) {
  static void* pools[kMaxDevices][2] = {};
  void*& pool = pools[device][which];
  if (!pool) {
    PoolProperties properties;
    properties.device = device;
    uint64_t keep_all = UINT64_MAX;  // a pool gives nothing back by itself: that would cost a device-wide wait
    if (cuda.create_pool(&pool, &properties) == 0) cuda.set_attribute(pool, kReleaseThreshold, &keep_all);
    else cuda.last_error();
  }
  return pool;
}
void* pool_take(Pool which, size_t size, int device, Stream stream) {
  OnDevice guard(device);
  void *p = nullptr, *pool = pool_of(which, device);
  if (pool && cuda.malloc_async(&p, size, pool, stream) == 0) return p;
  cuda.last_error();
  return nullptr;
}
void pool_give(void* p, size_t, int device, Stream stream) {
  OnDevice guard(device);
  cuda.free_async(p, stream);
}
void pool_trim(Pool which, int device) {
  OnDevice guard(device);
  cuda.device_wait();
  if (void* pool = pool_of(which, device)) cuda.trim_to(pool, 0);
}
size_t pool_bytes(Pool which, int device, size_t) {
  uint64_t bytes = 0;
  if (void* pool = pool_of(which, device)) cuda.get_attribute(pool, kReservedNow, &bytes);
  return bytes;
}
void* arena_take(size_t size, int device) {
  OnDevice guard(device);
  void* p = nullptr;
  if (cuda.malloc_now(&p, size) == 0) return p;
  cuda.last_error();
  return nullptr;
}
void arena_give(void* p, size_t, int device) {
  OnDevice guard(device);
  cuda.free_now(p);  // waits for the device
}
void wait_for(Stream stream, int device) {
  OnDevice guard(device);
  cuda.stream_wait(stream);
}
size_t total_bytes(int device) {
  OnDevice guard(device);
  size_t free_bytes = 0, total = 0;
  cuda.memory_info(&free_bytes, &total);
  return total;
}

#endif

}  // namespace

#ifdef MEMFIT_MALLOC
extern "C" void memfit_limit_heap(int64_t bytes) { heap_limit = bytes < 0 ? SIZE_MAX : size_t(bytes); }
extern "C" int memfit_bind(const char*) { return 1; }
#else
extern "C" int memfit_bind(const char* library) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) return 0;
  auto look_up = [handle](const char* name, auto& function) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    return function != nullptr;
  };
  return look_up("cudaGetDevice", cuda.get_device) && look_up("cudaSetDevice", cuda.set_device) &&
      look_up("cudaMallocFromPoolAsync", cuda.malloc_async) && look_up("cudaFreeAsync", cuda.free_async) &&
      look_up("cudaMalloc", cuda.malloc_now) && look_up("cudaFree", cuda.free_now) &&
      look_up("cudaMemPoolCreate", cuda.create_pool) && look_up("cudaMemPoolSetAttribute", cuda.set_attribute) &&
      look_up("cudaMemPoolGetAttribute", cuda.get_attribute) && look_up("cudaMemPoolTrimTo", cuda.trim_to) &&
      look_up("cudaStreamSynchronize", cuda.stream_wait) && look_up("cudaDeviceSynchronize", cuda.device_wait) &&
      look_up("cudaGetLastError", cuda.last_error) && look_up("cudaMemGetInfo", cuda.memory_info);
}
#endif
