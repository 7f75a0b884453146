// Positioned reads from files (vismoe/store/files.py says what is promised), and threads that make those of a layer's experts.

#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>

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
// A record that is read while others are computed.
struct Arrival {
  const OnDisk* of;
  std::int64_t expert;
  std::uint8_t* record;
  std::int64_t at;              // which of the call's records it is
  std::int64_t ended, failed;   // what ended it (kReadDone, ..), and after a failure the stretch, counted from its first
  std::int64_t reader;          // the thread that read it
  std::int64_t done;            // 1 afterwards
  double began_s, ended_s;      // of the steady clock
};

namespace vismoe {

constexpr std::int64_t kReadDone = 0, kEndedEarly = -1, kChanged = -2;  // above: an error's number

// Fills all pieces of `count` stretches and compares the files' states afterwards. bounce: `bounce_bytes` on a block.
std::int64_t read_all(const FileAccess& way, const Stretch* stretches, std::int64_t count, const iovec* pieces, std::uint8_t* bounce,
                      std::int64_t* failed);

// Threads that read, for all layers and models. They sleep between reads.
class Readers {
 public:
  void begin(Arrival* arrivals, std::size_t count);
  // Returns when one is done that `seen` [count] does not have, and sets those; false where all had been seen.
  bool wait(const Arrival* arrivals, std::size_t count, std::uint8_t* seen);
  void at_least(std::size_t threads);

 private:
  void serve(std::int64_t number);

  std::mutex mutex_;
  std::condition_variable wake_, arrived_;
  std::deque<Arrival*> waiting_;
  std::size_t wanted_ = 1, started_ = 0;
  friend void readers_begin_anew();
};

Readers& the_readers();
double now_s();

}  // namespace vismoe
