// The allocator behind planned arenas: records what one training step allocates, and replays planned offsets in one arena.
//
//     thread inside a run ──> k-th allocation ──> planned size, range free, same stream? ── yes ──> arena + offset[k]
//                                                                                        └─ no ──> scratch pool
//     any other thread, or outside a run; planned to outlive the step ───────────────────────────> lasting pool
//
// Safety does not rest on the recording: an address range of the arena is handed out only while no live block lies in it,
// whatever the sequence of calls, and only to the stream whose earlier work used it. A wrong plan costs memory, never data.
//
// Built on first use by arena_library.py. arena_device.hpp is what lies below.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena_device.hpp"

#if !defined(MEMFIT_MALLOC) && __has_include(<c10/util/Exception.h>)
#include <c10/util/Exception.h>
#define MEMFIT_C10 1
#endif

namespace {

constexpr int64_t kAlive = -1;
constexpr int64_t kElsewhere = -1;       // a planned allocation that belongs into the pool: it outlives its step
constexpr size_t kLookAhead = 64;        // how many planned allocations may be missing at once

// -- the books -------------------------------------------------------------------------------------------------------

struct Arena {
  char* base;
  size_t size;
  Stream stream = nullptr;
  std::map<size_t, size_t> live;  // offset -> end, never overlapping

  bool is_free(size_t from, size_t to) const {
    auto next = live.lower_bound(from);
    if (next != live.end() && next->first < to) return false;
    return next == live.begin() || std::prev(next)->second <= from;
  }
};

struct Program {  // one schedule of one shape
  int device;
  std::vector<size_t> sizes;
  std::vector<int64_t> offsets;
  size_t height = 0;
};

struct Record { size_t size; int64_t start, stop; bool in_arena; };

struct Run {  // one forward and its backward
  int64_t program;
  int64_t clock = 0;
  size_t cursor = 0;
  bool is_over = false;
  int64_t strays = 0, skipped = 0, collisions = 0;
  std::vector<Record> made;
};

struct Block {
  size_t size;
  int device;
  Stream stream;
  Arena* arena;
  Pool pool;  // where there is no arena
  size_t offset;
  int64_t run;
  size_t index;
  std::vector<Stream> readers;  // other streams that still read it
};

struct Counters { size_t allocated, allocated_peak, pool_live[2], reserved_peak, limit, num_allocations, num_in_arena; };

struct Books {
  std::mutex mutex;
  std::unordered_map<void*, Block> live;
  std::unordered_map<int64_t, Program> programs;
  std::unordered_map<int64_t, Run> runs;
  std::unique_ptr<Arena> current[kMaxDevices];
  std::vector<std::pair<int, std::unique_ptr<Arena>>> retired;  // too small, until their last block is gone
  Counters counters[kMaxDevices] = {};
  int64_t last_id = 0;
};

Books& books() {
  static Books& all = *new Books;  // never destroyed: tensors are freed until the very end of the process
  return all;
}

thread_local int64_t inside = 0;  // the run this thread is in

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

size_t arena_bytes(const Books& b, int device) {
  size_t bytes = b.current[device] ? b.current[device]->size : 0;
  for (const auto& [where, arena] : b.retired) if (where == device) bytes += arena->size;
  return bytes;
}

size_t reserved_bytes(const Books& b, int device) {
  const size_t* live = b.counters[device].pool_live;
  return arena_bytes(b, device) + pool_bytes(kLasting, device, live[kLasting]) + pool_bytes(kScratch, device, live[kScratch]);
}

void note_reserved(Books& b, int device) {
  Counters& c = b.counters[device];
  size_t now = reserved_bytes(b, device);
  if (now > c.reserved_peak) c.reserved_peak = now;
}

void trim_pools(int device) {
  pool_trim(kLasting, device);
  pool_trim(kScratch, device);
}

// The planned place of this allocation, or nullptr: not planned, planned for a pool, or somebody still lies there.
Arena* place(Books& b, Run& run, size_t size, int device, Stream stream, size_t* offset, Pool* pool) {
  auto found = b.programs.find(run.program);
  if (found == b.programs.end() || found->second.device != device || found->second.sizes.empty()) return nullptr;
  const Program& program = found->second;
  size_t k = run.cursor, end = std::min(program.sizes.size(), run.cursor + kLookAhead);
  while (k < end && program.sizes[k] != size) ++k;
  if (k == end) { ++run.strays; return nullptr; }
  run.skipped += int64_t(k - run.cursor);
  run.cursor = k + 1;
  Arena* arena = b.current[device].get();
  if (program.offsets[k] == kElsewhere) *pool = kLasting;
  if (program.offsets[k] == kElsewhere || !arena) return nullptr;
  size_t from = size_t(program.offsets[k]);
  if (from + size > arena->size || !arena->is_free(from, from + size)) { ++run.collisions; return nullptr; }
  if (arena->stream != stream) {  // what lies there is ordered by another stream's work
    if (!arena->live.empty()) { ++run.collisions; return nullptr; }
    wait_for(arena->stream, device);
    arena->stream = stream;
  }
  *offset = from;
  return arena;
}

void* out_of_memory(const Books& b, size_t size, int device) {
  const Counters& c = b.counters[device];
  std::string text = "CUDA out of memory. Tried to allocate " + std::to_string(size) + " bytes on device " + std::to_string(device) +
      "; live " + std::to_string(c.allocated) + ", reserved " + std::to_string(reserved_bytes(b, device)) + " (planned arena " +
      std::to_string(arena_bytes(b, device)) + ").";
#ifdef MEMFIT_C10
  throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
#elif defined(MEMFIT_MALLOC)
  return nullptr;  // nobody above could catch an exception
#else
  throw std::bad_alloc();
#endif
}

void* take_from_pool(Books& b, Pool pool, size_t size, int device, Stream stream) {
  Counters& c = b.counters[device];
  bool allowed = !c.limit || arena_bytes(b, device) + c.pool_live[kLasting] + c.pool_live[kScratch] + size <= c.limit;
  void* p = allowed ? pool_take(pool, size, device, stream) : nullptr;
  if (!p && allowed) {
    trim_pools(device);
    p = pool_take(pool, size, device, stream);
  }
  if (p) c.pool_live[pool] += size;
  return p;
}

void release_if_retired(Books& b, Arena* arena) {
  for (size_t k = 0; k < b.retired.size(); ++k) {
    if (b.retired[k].second.get() != arena || !arena->live.empty()) continue;
    arena_give(arena->base, arena->size, b.retired[k].first);
    b.retired.erase(b.retired.begin() + int64_t(k));
    return;
  }
}

// One arena as high as the highest program needs. It moves only when empty, or when it is too small: then the old one lives out.
bool fit_arena(Books& b, int device) {
  size_t wanted = 0;
  for (const auto& [id, program] : b.programs) if (program.device == device && program.height > wanted) wanted = program.height;
  wanted = round_up(wanted, kPage);
  auto& current = b.current[device];
  size_t size = current ? current->size : 0;
  if (wanted == size || (wanted < size && !current->live.empty())) return true;
  if (current) {
    Arena* old = current.get();
    b.retired.emplace_back(device, std::move(current));
    release_if_retired(b, old);
  }
  if (!wanted) return true;
  trim_pools(device);
  void* base = arena_take(wanted, device);
  if (base) current.reset(new Arena{static_cast<char*>(base), wanted, nullptr, {}});
  note_reserved(b, device);
  return base != nullptr;
}

bool valid(int64_t device) { return device >= 0 && device < kMaxDevices; }

}  // namespace

// -- what torch calls ------------------------------------------------------------------------------------------------

extern "C" void* memfit_alloc(size_t size, int device, Stream stream) {
  if (size == 0 || !valid(device)) return nullptr;
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  size = round_up(size, kBlock);
  auto run = inside ? b.runs.find(inside) : b.runs.end();
  bool in_run = run != b.runs.end() && !run->second.is_over;
  Block block{size, device, stream, nullptr, in_run ? kScratch : kLasting, 0, 0, 0, {}};
  if (in_run) block.arena = place(b, run->second, size, device, stream, &block.offset, &block.pool);
  void* p;
  if (block.arena) {
    p = block.arena->base + block.offset;
    block.arena->live.emplace(block.offset, block.offset + size);
  } else {
    p = take_from_pool(b, block.pool, size, device, stream);
    if (!p) return out_of_memory(b, size, device);
  }
  if (in_run) {
    block.run = run->first;
    block.index = run->second.made.size();
    run->second.made.push_back({size, run->second.clock++, kAlive, block.arena != nullptr});
  }
  Counters& c = b.counters[device];
  c.allocated += size;
  c.num_allocations += 1;
  c.num_in_arena += block.arena != nullptr;
  if (c.allocated > c.allocated_peak) c.allocated_peak = c.allocated;
  if (!block.arena) note_reserved(b, device);
  b.live.emplace(p, std::move(block));
  return p;
}

extern "C" void memfit_free(void* p, size_t, int, Stream) {
  if (!p) return;
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  auto found = b.live.find(p);
  if (found == b.live.end()) return;
  Block block = std::move(found->second);
  b.live.erase(found);
  for (Stream reader : block.readers) wait_for(reader, block.device);
  auto run = block.run ? b.runs.find(block.run) : b.runs.end();
  if (run != b.runs.end()) run->second.made[block.index].stop = run->second.is_over ? run->second.clock : run->second.clock++;
  b.counters[block.device].allocated -= block.size;
  if (block.arena) {
    block.arena->live.erase(block.offset);
    release_if_retired(b, block.arena);
  } else {
    pool_give(p, block.size, block.device, block.stream);
    b.counters[block.device].pool_live[block.pool] -= block.size;
  }
}

extern "C" void memfit_record_stream(void* p, Stream stream) {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  auto found = b.live.find(p);
  if (found != b.live.end() && found->second.stream != stream) found->second.readers.push_back(stream);
}

extern "C" void memfit_set_fraction(double fraction, int device) {
  if (!valid(device)) return;
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  b.counters[device].limit = fraction >= 1.0 ? 0 : size_t(fraction * double(total_bytes(device)));
}

extern "C" void memfit_empty() {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  for (int device = 0; device < kMaxDevices; ++device) if (b.counters[device].num_allocations) trim_pools(device);
}

// -- what memfit calls -----------------------------------------------------------------------------------------------

extern "C" int64_t memfit_new_program(int device) {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  if (!valid(device)) return 0;
  b.programs.emplace(++b.last_id, Program{device, {}, {}});
  return b.last_id;
}

extern "C" void memfit_drop_program(int64_t id) {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  auto found = b.programs.find(id);
  if (found == b.programs.end()) return;
  int device = found->second.device;
  b.programs.erase(found);
  if (b.current[device] && b.current[device]->live.empty()) fit_arena(b, device);
}

// Give a program its offsets (kElsewhere: from the pool). 1, or 0 when the arena could not be had: then all comes from the pool.
extern "C" int memfit_commit(int64_t id, int64_t count, const int64_t* sizes, const int64_t* offsets, int64_t height) {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  auto found = b.programs.find(id);
  if (found == b.programs.end()) return 0;
  Program& program = found->second;
  program.sizes.assign(sizes, sizes + count);
  program.offsets.assign(offsets, offsets + count);
  program.height = size_t(height);
  if (fit_arena(b, program.device)) return 1;
  program.sizes.clear();
  program.offsets.clear();
  program.height = 0;
  return 0;
}

// Between steps that keep to their plan: what is left of an earlier recording goes back to the driver.
extern "C" void memfit_tidy(int64_t id) {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  auto found = b.programs.find(id);
  if (found == b.programs.end()) return;
  int device = found->second.device;
  if (!b.counters[device].pool_live[kScratch] && pool_bytes(kScratch, device, 0)) pool_trim(kScratch, device);
}

extern "C" int64_t memfit_new_run(int64_t program) {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  Run run;
  run.program = program;
  b.runs.emplace(++b.last_id, std::move(run));
  return b.last_id;
}

extern "C" int64_t memfit_enter(int64_t run) { return std::exchange(inside, run); }  // what this thread was in before

extern "C" void memfit_finish_run(int64_t id) {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  auto found = b.runs.find(id);
  if (found != b.runs.end()) found->second.is_over = true;
}

extern "C" void memfit_drop_run(int64_t id) {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  b.runs.erase(id);
}

// allocations made, planned ones it skipped, unplanned ones, planned ones whose place was taken, blocks of it still in the arena
extern "C" void memfit_verdict(int64_t id, int64_t* out) {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  auto found = b.runs.find(id);
  if (found == b.runs.end()) return;
  const Run& run = found->second;
  auto program = b.programs.find(run.program);
  int64_t missing = program == b.programs.end() ? 0 : int64_t(program->second.sizes.size()) - int64_t(run.cursor);
  out[0] = int64_t(run.made.size());
  out[1] = run.skipped + missing;
  out[2] = run.strays;
  out[3] = run.collisions;
  out[4] = 0;
  for (const Record& r : run.made) out[4] += r.stop == kAlive && r.in_arena;
}

// Rows of (size, start, stop); stop is -1 for what is still alive. Returns the clock, which no stop exceeds.
extern "C" int64_t memfit_read_run(int64_t id, int64_t count, int64_t* out) {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  auto found = b.runs.find(id);
  if (found == b.runs.end()) return 0;
  for (int64_t k = 0; k < count && k < int64_t(found->second.made.size()); ++k) {
    const Record& r = found->second.made[size_t(k)];
    out[3 * k] = int64_t(r.size), out[3 * k + 1] = r.start, out[3 * k + 2] = r.stop;
  }
  return found->second.clock;
}

// allocated now and at most, reserved now and at most, arena, allocations so far and how many of them in the arena
extern "C" void memfit_stats(int device, int64_t* out) {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  if (!valid(device)) return;
  const Counters& c = b.counters[device];
  size_t reserved = c.num_allocations || b.current[device] ? reserved_bytes(b, device) : 0;
  const size_t values[] = {c.allocated, c.allocated_peak, reserved, std::max(reserved, c.reserved_peak), arena_bytes(b, device),
                           c.num_allocations, c.num_in_arena};
  for (size_t k = 0; k < 7; ++k) out[k] = int64_t(values[k]);
}

extern "C" void memfit_reset_peaks(int device) {
  Books& b = books();
  std::lock_guard<std::mutex> lock(b.mutex);
  if (!valid(device)) return;
  b.counters[device].allocated_peak = b.counters[device].allocated;
  b.counters[device].reserved_peak = 0;
  if (b.counters[device].num_allocations) note_reserved(b, device);
}
