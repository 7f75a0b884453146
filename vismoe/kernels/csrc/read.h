// Positioned reads from files (vismoe/store/files.py says what is promised), and threads that make those of a layer's experts.

#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

// The structures of vismoe/kernels/read.py.
struct File {
  std::int64_t descriptor, bytes, mtime_ns, ctime_ns;
  std::uint64_t inode, device;
};
struct Stretch {
  std::int64_t file, offset, pieces;  // pieces: how many of those given are its own
};
struct FileAccess {
  const File* files;
  // preadv, with the error's number below zero; null: the system's.
  ssize_t (*read)(int descriptor, const iovec* pieces, int count, std::int64_t offset);
  std::int64_t bounce_bytes;  // 0: through the page cache
  std::int64_t block_bytes, logical_block_bytes;
  std::int64_t memory_bytes;  // to what memory is aligned that a disk writes to
  std::int64_t most_bytes;    // of one call of the system, whole blocks
};
struct Piece {
  std::int64_t begin, bytes;  // of a record
};
struct OnDisk {  // experts of a store
  FileAccess way;
  const Stretch* stretches;
  const Piece* pieces;
  const std::int64_t *first_stretch, *first_piece;  // [experts + 1]
};
// A record that threads read. Its stretches are shared by the threads that read.
struct Arrival {
  const OnDisk* of;
  std::int64_t expert;
  std::uint8_t* record;
  std::int64_t at;             // which of the call's records it is
  std::int64_t ended, failed;  // what ended it (kReadDone, ..), and after a failure the stretch, counted from its first
  std::int64_t lane;           // of those that are read at the same time, for a timeline
  std::int64_t begun, left;    // stretches that a thread has taken, and that are not read yet
  std::int64_t done;           // 1 afterwards
  double began_s, ended_s;     // of the steady clock
};

namespace vismoe {

constexpr std::int64_t kReadDone = 0, kEndedEarly = -1, kChanged = -2;  // above: an error's number

// Threads that read, for all layers and models. They sleep between reads.
class Readers {
 public:
  void begin(Arrival* const* arrivals, std::size_t count);
  // Returns when one is done that `seen` [count] does not have, and sets those; false where all had been seen.
  bool wait(const Arrival* const* arrivals, std::size_t count, std::uint8_t* seen);
  void at_least(std::size_t threads);

 private:
  void serve();
  std::int64_t free_lane();

  std::mutex mutex_;
  std::condition_variable wake_, arrived_;
  std::deque<Arrival*> waiting_;  // of which a stretch at least is left to take
  std::vector<bool> lanes_;  // whether a record that is being read has it
  std::size_t wanted_ = 1, started_ = 0;
  friend void readers_begin_anew();
};

Readers& the_readers();
double now_s();

}  // namespace vismoe
