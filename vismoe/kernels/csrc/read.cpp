// Positioned reads from files, all that an expert takes in one call. vismoe/store/files.py says what is promised.

#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include "api.h"

// The structures of vismoe/kernels/read.py.
struct File {
  std::int64_t descriptor, bytes, mtime_ns, ctime_ns;
  std::uint64_t inode, device;
};
struct Stretch {
  std::int64_t file, offset, pieces;  // pieces: how many of those given are its own
};
struct Read {
  const File* files;
  const Stretch* stretches;
  const iovec* pieces;
  std::uint8_t* bounce;  // on a block, whole blocks long; null: the files are read through the page cache
  std::int64_t count, bounce_bytes, block_bytes, logical_block_bytes;
  std::int64_t failed;  // after a failure: its stretch
  // preadv, with the error's number below zero; null: the system's.
  ssize_t (*read)(int descriptor, const iovec* pieces, int count, std::int64_t offset);
};

namespace {

constexpr std::int64_t kDone = 0, kEndedEarly = -1, kChanged = -2;  // above: an error's number
constexpr std::size_t kMostPieces = 1024;                           // that the system takes at once

ssize_t system_read(int descriptor, const iovec* pieces, int count, std::int64_t offset) {
  ssize_t got;
  do got = preadv(descriptor, pieces, count, offset);
  while (got < 0 && errno == EINTR);
  return got < 0 ? -errno : got;
}

struct Reader {
  const Read& of;

  ssize_t once(const File& file, const iovec* pieces, std::size_t count, std::int64_t offset) const {
    const auto read = of.read != nullptr ? of.read : system_read;
    return read(static_cast<int>(file.descriptor), pieces, static_cast<int>(std::min(count, kMostPieces)), offset);
  }

  bool in_blocks(std::int64_t offset, const iovec* pieces, std::int64_t count) const {
    std::uint64_t rest = static_cast<std::uint64_t>(offset);
    for (std::int64_t p = 0; p < count; p++) rest |= reinterpret_cast<std::uintptr_t>(pieces[p].iov_base) | pieces[p].iov_len;
    return rest % static_cast<std::uint64_t>(of.block_bytes) == 0;  // blocks are a power of two
  }

  // Straight into the pieces.
  std::int64_t straight(const File& file, std::int64_t offset, std::int64_t wanted, std::vector<iovec> left) const {
    auto first = left.begin();
    for (std::int64_t done = 0; done < wanted;) {
      ssize_t got = once(file, &*first, static_cast<std::size_t>(left.end() - first), offset + done);
      if (got < 0) return -got;
      done += got;
      if (done < wanted && (got == 0 || (of.bounce != nullptr && got % of.logical_block_bytes != 0))) return kEndedEarly;
      for (auto rest = static_cast<std::size_t>(got); rest > 0 || (first != left.end() && first->iov_len == 0);) {
        const std::size_t taken = std::min(rest, first->iov_len);
        first->iov_base = static_cast<std::uint8_t*>(first->iov_base) + taken;
        first->iov_len -= taken, rest -= taken;
        if (first->iov_len == 0) first++;
      }
    }
    return kDone;
  }

  // Whole blocks into the bounce buffer, and from there.
  std::int64_t bounced(const File& file, std::int64_t begin, std::int64_t wanted, const iovec* piece) const {
    const std::int64_t end = begin + wanted, block = of.block_bytes;
    std::size_t filled = 0;  // of this piece
    for (std::int64_t at = begin / block * block; at < end;) {
      const iovec into{of.bounce, static_cast<std::size_t>(std::min(of.bounce_bytes, (end - at + block - 1) / block * block))};
      const ssize_t got = once(file, &into, 1, at);
      if (got < 0) return -got;
      if (got == 0 || (got % of.logical_block_bytes != 0 && at + got < end)) return kEndedEarly;
      const std::int64_t last = std::min<std::int64_t>(got, end - at);
      for (std::int64_t from = std::max<std::int64_t>(begin - at, 0); from < last;) {
        const std::size_t taken = std::min(static_cast<std::size_t>(last - from), piece->iov_len - filled);
        std::memcpy(static_cast<std::uint8_t*>(piece->iov_base) + filled, of.bounce + from, taken);
        from += static_cast<std::int64_t>(taken), filled += taken;
        if (filled == piece->iov_len) piece++, filled = 0;
      }
      at += got;
    }
    return kDone;
  }

  bool is_as_before(const File& file) const {
    struct stat now;
    if (fstat(static_cast<int>(file.descriptor), &now) != 0) return false;
#if defined(__APPLE__)
    const timespec &mtime = now.st_mtimespec, &ctime = now.st_ctimespec;
#else
    const timespec &mtime = now.st_mtim, &ctime = now.st_ctim;
#endif
    const auto in_ns = [](const timespec& time) { return std::int64_t{1000000000} * time.tv_sec + time.tv_nsec; };
    return now.st_size == file.bytes && in_ns(mtime) == file.mtime_ns && in_ns(ctime) == file.ctime_ns &&
           static_cast<std::uint64_t>(now.st_ino) == file.inode && static_cast<std::uint64_t>(now.st_dev) == file.device;
  }
};

}  // namespace

// Fills all pieces and compares the files' states afterwards; returns what ended it, `failed` says where.
VISMOE_API std::int64_t vismoe_read(Read* reads) {
  const Reader reader{*reads};
  const iovec* pieces = reads->pieces;
  for (std::int64_t& s = reads->failed = 0; s < reads->count; s++) {
    const Stretch& stretch = reads->stretches[s];
    const File& file = reads->files[stretch.file];
    std::int64_t wanted = 0;
    for (std::int64_t p = 0; p < stretch.pieces; p++) wanted += static_cast<std::int64_t>(pieces[p].iov_len);
    const bool bounced = reads->bounce != nullptr && !reader.in_blocks(stretch.offset, pieces, stretch.pieces);
    const std::int64_t ended = bounced ? reader.bounced(file, stretch.offset, wanted, pieces)
                                       : reader.straight(file, stretch.offset, wanted, {pieces, pieces + stretch.pieces});
    if (ended != kDone) return ended;
    pieces += stretch.pieces;
  }
  for (std::int64_t& s = reads->failed = 0; s < reads->count; s++) {
    const std::int64_t file = reads->stretches[s].file;
    if ((s == 0 || file != reads->stretches[s - 1].file) && !reader.is_as_before(reads->files[file])) return kChanged;
  }
  return kDone;
}
