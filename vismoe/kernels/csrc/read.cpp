#include "read.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#if defined(__linux__)
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "api.h"

namespace vismoe {
namespace {

constexpr std::size_t kMostPieces = 1024;        // that the system takes at once
constexpr std::size_t kHugePage = std::size_t{2} << 20;  // into which a disk reads fastest (docs/benchmark.md)

ssize_t system_read(int descriptor, const iovec* pieces, int count, std::int64_t offset) {
  ssize_t got;
  do got = preadv(descriptor, pieces, count, offset);
  while (got < 0 && errno == EINTR);
  return got < 0 ? -errno : got;
}

struct Reading {
  const FileAccess& way;
  std::uint8_t* bounce;

  ssize_t once(const File& file, const iovec* pieces, std::size_t count, std::int64_t offset) const {
    const auto read = way.read != nullptr ? way.read : system_read;
    return read(static_cast<int>(file.descriptor), pieces, static_cast<int>(std::min(count, kMostPieces)), offset);
  }

  // Straight into the pieces, of which the last may have room for more than is wanted.
  std::int64_t straight(const File& file, std::int64_t offset, std::int64_t wanted, std::vector<iovec> left) const {
    auto first = left.begin();
    for (std::int64_t done = 0; done < wanted;) {
      auto last = first;
      std::int64_t room = way.most_bytes;
      while (last != left.end() && room > 0) room -= static_cast<std::int64_t>((last++)->iov_len);
      const std::size_t cut = room < 0 ? static_cast<std::size_t>(-room) : 0;  // off the last piece of this read
      last[-1].iov_len -= cut;
      const ssize_t got = once(file, &*first, static_cast<std::size_t>(last - first), offset + done);
      last[-1].iov_len += cut;
      if (got < 0) return -got;
      done += got;
      if (done < wanted && (got == 0 || (way.bounce_bytes > 0 && got % way.logical_block_bytes != 0))) return kEndedEarly;
      for (auto rest = static_cast<std::size_t>(got); rest > 0 || (first != left.end() && first->iov_len == 0);) {
        const std::size_t taken = std::min(rest, first->iov_len);
        first->iov_base = static_cast<std::uint8_t*>(first->iov_base) + taken;
        first->iov_len -= taken, rest -= taken;
        if (first->iov_len == 0) first++;
      }
    }
    return kReadDone;
  }

  // Whole blocks straight into the pieces, and in the same read, through the bounce buffer, the blocks at their edges. False
  // where the disk cannot write to where the pieces lie, or edges are most of it.
  bool by_blocks(const File& file, std::int64_t begin, std::int64_t wanted, const iovec* pieces, std::int64_t count,
                 std::int64_t* ended) const {
    struct Edge {
      std::int64_t begin, end;  // in the file
      const std::uint8_t* bytes;
    };
    const std::int64_t block = way.block_bytes, end = begin + wanted, first = begin / block * block;
    std::vector<iovec> parts;
    std::vector<Edge> edges;
    std::int64_t at = first, edge_bytes = 0;  // up to where `parts` read
    const auto edge_to = [&](std::int64_t next) {
      if (next == at) return;
      edges.push_back({at, next, bounce + edge_bytes});
      parts.push_back({bounce + edge_bytes, static_cast<std::size_t>(next - at)});
      edge_bytes += next - at, at = next;
    };
    std::int64_t from = begin;
    for (std::int64_t p = 0; p < count; from += static_cast<std::int64_t>(pieces[p++].iov_len)) {
      auto* const piece = static_cast<std::uint8_t*>(pieces[p].iov_base);
      if ((static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(piece)) - from) % way.memory_bytes != 0) return false;
      const std::int64_t whole = (from + block - 1) / block * block;
      const std::int64_t whole_end = (from + static_cast<std::int64_t>(pieces[p].iov_len)) / block * block;
      if (whole >= whole_end) continue;
      edge_to(whole);
      parts.push_back({piece + (whole - from), static_cast<std::size_t>(whole_end - whole)});
      at = whole_end;
    }
    edge_to((end + block - 1) / block * block);
    if (edge_bytes > std::min(way.bounce_bytes, wanted / 2)) return false;
    *ended = straight(file, first, end - first, std::move(parts));
    if (*ended > 0) return false;  // the disk may want more than the system said; else it fails again
    from = begin;
    for (std::int64_t p = 0; p < count && *ended == kReadDone; from += static_cast<std::int64_t>(pieces[p++].iov_len)) {
      for (const Edge& edge : edges) {
        const std::int64_t left = std::max(from, edge.begin);
        const std::int64_t right = std::min(from + static_cast<std::int64_t>(pieces[p].iov_len), edge.end);
        auto* const piece = static_cast<std::uint8_t*>(pieces[p].iov_base);
        if (left < right) std::memcpy(piece + (left - from), edge.bytes + (left - edge.begin), static_cast<std::size_t>(right - left));
      }
    }
    return true;
  }

  // Whole blocks into the bounce buffer, and from there.
  std::int64_t bounced(const File& file, std::int64_t begin, std::int64_t wanted, const iovec* piece) const {
    const std::int64_t end = begin + wanted, block = way.block_bytes, most = std::min(way.bounce_bytes, way.most_bytes);
    std::size_t filled = 0;  // of this piece
    for (std::int64_t at = begin / block * block; at < end;) {
      const iovec into{bounce, static_cast<std::size_t>(std::min(most, (end - at + block - 1) / block * block))};
      const ssize_t got = once(file, &into, 1, at);
      if (got < 0) return -got;
      if (got == 0 || (got % way.logical_block_bytes != 0 && at + got < end)) return kEndedEarly;
      const std::int64_t last = std::min<std::int64_t>(got, end - at);
      for (std::int64_t from = std::max<std::int64_t>(begin - at, 0); from < last;) {
        const std::size_t taken = std::min(static_cast<std::size_t>(last - from), piece->iov_len - filled);
        std::memcpy(static_cast<std::uint8_t*>(piece->iov_base) + filled, bounce + from, taken);
        from += static_cast<std::int64_t>(taken), filled += taken;
        if (filled == piece->iov_len) piece++, filled = 0;
      }
      at += got;
    }
    return kReadDone;
  }
};

std::int64_t compared(const File& file) {
  struct stat now;
  if (fstat(static_cast<int>(file.descriptor), &now) != 0) return errno;
#if defined(__APPLE__)
  const timespec &mtime = now.st_mtimespec, &ctime = now.st_ctimespec;
#else
  const timespec &mtime = now.st_mtim, &ctime = now.st_ctim;
#endif
  const auto in_ns = [](const timespec& time) { return std::int64_t{1000000000} * time.tv_sec + time.tv_nsec; };
  const bool same = now.st_size == file.bytes && in_ns(mtime) == file.mtime_ns && in_ns(ctime) == file.ctime_ns &&
                    static_cast<std::uint64_t>(now.st_ino) == file.inode && static_cast<std::uint64_t>(now.st_dev) == file.device;
  return same ? kReadDone : kChanged;
}

// Fills all pieces of a stretch.
std::int64_t read_one(const FileAccess& way, const Stretch& stretch, const iovec* pieces, std::uint8_t* bounce) {
  const Reading reading{way, bounce};
  const File& file = way.files[stretch.file];
  std::int64_t wanted = 0;
  for (std::int64_t p = 0; p < stretch.pieces; p++) wanted += static_cast<std::int64_t>(pieces[p].iov_len);
  std::int64_t ended = kReadDone;
  if (way.bounce_bytes == 0)
    ended = reading.straight(file, stretch.offset, wanted, {pieces, pieces + stretch.pieces});
  else if (!reading.by_blocks(file, stretch.offset, wanted, pieces, stretch.pieces, &ended))
    ended = reading.bounced(file, stretch.offset, wanted, pieces);
  return ended;
}

// Compares the states of their files, after they were read.
std::int64_t compare_all(const FileAccess& way, const Stretch* stretches, std::int64_t count, std::int64_t* failed) {
  for (std::int64_t& s = *failed = 0; s < count; s++) {
    const std::int64_t file = stretches[s].file;
    if (s > 0 && file == stretches[s - 1].file) continue;
    if (const std::int64_t found = compared(way.files[file])) return found;
  }
  return kReadDone;
}

// Of one thread; huge pages where the system has them.
class Bounce {
 public:
  std::uint8_t* of(std::int64_t bytes) {
    if (static_cast<std::size_t>(bytes) > bytes_) {
      bytes_ = 0;
      const std::size_t pages = (static_cast<std::size_t>(bytes) + kHugePage - 1) / kHugePage * kHugePage;
      memory_.reset(static_cast<std::uint8_t*>(std::aligned_alloc(kHugePage, pages)));
      if (!memory_) throw std::bad_alloc();
      bytes_ = pages;
#if defined(MADV_HUGEPAGE)
      madvise(memory_.get(), bytes_, MADV_HUGEPAGE);
#endif
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(std::uint8_t* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::uint8_t, Free> memory_;
  std::size_t bytes_ = 0;
};

Readers* readers = nullptr;

}  // namespace

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void Readers::at_least(std::size_t threads) {
  std::lock_guard<std::mutex> lock(mutex_);
  wanted_ = std::max(wanted_, threads);
}

void Readers::begin(Arrival* const* arrivals, std::size_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (; started_ < wanted_; started_++) {
    try {
      std::thread(&Readers::serve, this).detach();
    } catch (...) {
      if (started_ == 0) throw;
      break;  // fewer read
    }
  }
  lanes_.resize(std::max(lanes_.size(), started_ + 1));  // each thread has a record, and the first in line may wait half read
  const std::deque<Arrival*> more(arrivals, arrivals + count);
  waiting_.insert(waiting_.end(), more.begin(), more.end());  // all or, where memory is short, none
  for (Arrival* arrival : more) {
    const std::int64_t* first = arrival->of->first_stretch + arrival->expert;
    arrival->begun = arrival->done = 0, arrival->ended = kReadDone, arrival->left = first[1] - first[0];
  }
  wake_.notify_all();
}

bool Readers::wait(const Arrival* const* arrivals, std::size_t count, std::uint8_t* seen) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    bool found = false, left = false;
    for (std::size_t i = 0; i < count; i++) {
      if (seen[i]) continue;
      (arrivals[i]->done ? found : left) = true;
      seen[i] = arrivals[i]->done != 0;
    }
    if (found || !left) return found;
    arrived_.wait(lock);
  }
}

std::int64_t Readers::free_lane() {
  const auto found = std::find(lanes_.begin(), lanes_.end(), false);
  *found = true;
  return found - lanes_.begin();
}

void Readers::serve() {
  Bounce bounce;
  std::vector<iovec> pieces;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return !waiting_.empty(); });
    Arrival& arrival = *waiting_.front();
    const OnDisk& of = *arrival.of;
    const std::int64_t first = of.first_stretch[arrival.expert], count = of.first_stretch[arrival.expert + 1] - first;
    const std::int64_t taken = arrival.begun++;
    if (arrival.begun == count) waiting_.pop_front();
    if (taken == 0) arrival.lane = free_lane(), arrival.began_s = now_s();
    const bool wanted = arrival.ended == kReadDone;  // else another stretch has failed
    lock.unlock();
    std::int64_t ended = kReadDone;
    try {
      const Piece* piece = of.pieces + of.first_piece[arrival.expert];
      for (std::int64_t s = first; s < first + taken; s++) piece += of.stretches[s].pieces;
      pieces.clear();
      for (std::int64_t p = 0; p < of.stretches[first + taken].pieces; p++)
        pieces.push_back({arrival.record + piece[p].begin, static_cast<std::size_t>(piece[p].bytes)});
      std::uint8_t* memory = of.way.bounce_bytes > 0 ? bounce.of(of.way.bounce_bytes) : nullptr;
      if (wanted) ended = read_one(of.way, of.stretches[first + taken], pieces.data(), memory);
    } catch (const std::bad_alloc&) {
      ended = ENOMEM;
    }
    lock.lock();
    if (ended != kReadDone && arrival.ended == kReadDone) arrival.ended = ended, arrival.failed = taken;
    if (--arrival.left > 0) continue;
    if (arrival.ended == kReadDone) {
      lock.unlock();
      std::int64_t failed = 0;
      ended = compare_all(of.way, of.stretches + first, count, &failed);
      lock.lock();
      arrival.ended = ended, arrival.failed = failed;
    }
    arrival.ended_s = now_s();
    lanes_[static_cast<std::size_t>(arrival.lane)] = false;
    arrival.done = 1;
    arrived_.notify_all();
  }
}

// A forked child has none of its parent's threads.
void readers_begin_anew() {
  Readers* fresh = new Readers;
  fresh->wanted_ = readers->wanted_;
  readers = fresh;
}

Readers& the_readers() {
  static std::once_flag once;
  std::call_once(once, [] {
    readers = new Readers;
    pthread_atfork(nullptr, nullptr, readers_begin_anew);
  });
  return *readers;
}

}  // namespace vismoe

using namespace vismoe;

// Fills all pieces of `count` stretches; returns what ended it (read.h), and which of them failed.
VISMOE_API std::int64_t vismoe_read(const FileAccess* way, const Stretch* stretches, std::int64_t count, const iovec* pieces,
                                    std::uint8_t* bounce, std::int64_t* failed) {
  for (std::int64_t& s = *failed = 0; s < count; s++) {
    if (const std::int64_t ended = read_one(*way, stretches[s], pieces, bounce)) return ended;
    pieces += stretches[s].pieces;
  }
  return compare_all(*way, stretches, count, failed);
}

// To what memory has to be aligned that this file is read into past the page cache; 0: the system does not say.
VISMOE_API std::int64_t vismoe_memory_alignment(std::int64_t descriptor) {
#if defined(SYS_statx)
  constexpr std::uint32_t asked = 0x2000;  // STATX_DIOALIGN, since Linux 6.1; headers may be older
  std::uint32_t found[64] = {};            // struct statx: at 0 what it has, at 38 stx_dio_mem_align
  if (syscall(SYS_statx, static_cast<int>(descriptor), "", AT_EMPTY_PATH, asked, found) == 0 && (found[0] & asked) != 0)
    return found[38];
#endif
  return 0;
}

// Threads begin to read; the arrivals must stay until they are done.
VISMOE_API std::int32_t vismoe_begin_reading(Arrival* const* arrivals, std::size_t count) try {
  the_readers().begin(arrivals, count);
  return 0;
} catch (const std::exception&) {
  return 1;
}

// The same for one, in a call that returns when it is done: nothing of its caller's can come in between.
VISMOE_API std::int32_t vismoe_read_at_once(Arrival* arrival) try {
  std::uint8_t seen = 0;
  the_readers().begin(&arrival, 1);
  the_readers().wait(&arrival, 1, &seen);
  return 0;
} catch (const std::exception&) {
  return 1;
}

// Returns when all that have begun are done.
VISMOE_API void vismoe_wait_for_reading(const Arrival* const* arrivals, std::size_t count) {
  for (std::size_t i = 0; i < count; i++) {
    std::uint8_t seen = 0;
    the_readers().wait(arrivals + i, 1, &seen);
  }
}

// So many threads at least read what arrives from now on.
VISMOE_API void vismoe_start_readers(std::size_t threads) { the_readers().at_least(threads); }
