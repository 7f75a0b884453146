// Lossless records: their headers, their sections, and the choice of an instruction set.

#include "lossless.h"

#include "api.h"

VISMOE_API std::uint32_t vismoe_lossless_isas();

namespace vismoe::lossless {
namespace {

constexpr std::uint64_t kMagic = 0x314c656f6d736976;  // "vismoeL1"
constexpr std::uint64_t kDiskBlockBytes = 4096;
constexpr std::uint64_t kRowBytes = 3 * 8;  // of the header

// As in vismoe/formats/lossless.py and vismoe/kernels/lossless.py.
enum Kind : std::uint64_t { kStored = 0, kPacked = 1 };
enum Fault : std::int32_t { kNoFault = 0, kBadHeader = 1, kOutOfBounds = 2, kBadEscapes = 3 };
enum Isa : std::int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// A section of a raw record.
struct Section {
  std::uint64_t offset_bytes, bytes, packable;
};

// A row of the header: a section of an encoded record.
struct Encoded {
  std::uint64_t kind, offset_bytes, escapes;
};

constexpr std::uint64_t header_bytes(std::uint64_t sections) { return round_up((1 + sections) * kRowBytes, kAlignment); }

// Decodes one part of one section into out [bytes].
Fault decode_section(const std::uint8_t* record, std::uint64_t content_bytes, const Encoded& encoded, const Section& section,
                     std::uint8_t* out, std::uint64_t part, std::uint64_t parts, DecodeBlocks* decode) {
  const std::uint64_t weights = section.bytes / 2;
  if (encoded.kind != kStored && (encoded.kind != kPacked || !section.packable)) return kBadHeader;
  const std::uint64_t needed = encoded.kind == kStored ? section.bytes : fixed_bytes(weights) + kTailBytes;
  if (encoded.offset_bytes > content_bytes || needed > content_bytes - encoded.offset_bytes) return kOutOfBounds;
  const std::uint8_t* from = record + encoded.offset_bytes;
  if (encoded.kind == kStored) {
    const std::uint64_t first = section.bytes * part / parts, last = section.bytes * (part + 1) / parts;
    std::memcpy(out + first, from + first, last - first);
    return kNoFault;
  }
  if (encoded.escapes > content_bytes - encoded.offset_bytes - needed) return kOutOfBounds;
  const Packed packed{parts_of(from, weights), weights, encoded.escapes};
  const std::uint64_t blocks = blocks_of(weights);
  const bool good = escapes_before(packed, 0) == 0 && decode(packed, blocks * part / parts, blocks * (part + 1) / parts, out);
  return good ? kNoFault : kBadEscapes;
}

DecodeBlocks* decoder_of(Isa isa) {
#if defined(__x86_64__)
  if (isa == kAvx512) return decode_blocks_avx512;
  if (isa == kAvx2) return decode_blocks_avx2;
#endif
  (void)isa;
  return decode_blocks_portable;
}

}  // namespace

const std::uint8_t* weights_of(const std::uint8_t* record, std::uint64_t section, std::uint64_t weights, std::uint64_t first,
                               std::uint64_t last, std::uint8_t* out) {
  static DecodeBlocks* const decode = [] {
    const std::uint32_t isas = vismoe_lossless_isas();
#if defined(__x86_64__)
    if (isas >> kAvx512 & 1) return decode_blocks_avx512_near;
#endif
    return decoder_of(isas >> kAvx2 & 1 ? kAvx2 : kPortable);
  }();
  const Encoded row = load<Encoded>(record + (1 + section) * kRowBytes);
  const std::uint8_t* from = record + row.offset_bytes;
  if (row.kind == kStored) return from + 2 * first;
  const Packed packed{parts_of(from, weights), weights, row.escapes};
  const std::uint64_t end = (last + kBlockWeights - 1) / kBlockWeights;
  return decode(packed, first / kBlockWeights, end, out - 2 * first) ? out : nullptr;  // it counts from the first weight of all
}

}  // namespace vismoe::lossless

using namespace vismoe::lossless;

// The instruction sets that this machine has: bit i for Isa i. AVX-512 counts only with VBMI2.
VISMOE_API std::uint32_t vismoe_lossless_isas() {
  std::uint32_t found = 1u << kPortable;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && vismoe::has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2) found |= 1u << kAvx2;
  if (avx512 && __builtin_cpu_supports("avx512vbmi2")) found |= 1u << kAvx512;
#endif
  return found;
}

// Encodes a raw record; `encoded` has room for the largest one. Returns the bytes written, in whole disk blocks.
VISMOE_API std::uint64_t vismoe_lossless_encode(const std::uint8_t* record, const Section* sections, std::uint64_t count,
                                                std::uint8_t* encoded) {
  std::uint64_t end = header_bytes(count);
  std::memset(encoded, 0, end);
  for (std::uint64_t s = 0; s < count; s++) {
    const std::uint8_t* from = record + sections[s].offset_bytes;
    Encoded row{kPacked, end, 0};
    std::uint64_t bytes = sections[s].packable ? pack(from, sections[s].bytes / 2, encoded + end, row.escapes) : 0;
    if (bytes == 0) {
      row.kind = kStored;
      bytes = sections[s].bytes;
      std::memcpy(encoded + end, from, bytes);
    }
    std::memcpy(encoded + (1 + s) * kRowBytes, &row, kRowBytes);
    const std::uint64_t next = round_up(end + bytes, kAlignment);
    std::memset(encoded + end + bytes, 0, next - end - bytes);
    end = next;
  }
  const std::uint64_t first_row[3] = {kMagic, end + kTailBytes, count};
  std::memcpy(encoded, first_row, kRowBytes);
  const std::uint64_t whole = round_up(end + kTailBytes, kDiskBlockBytes);
  std::memset(encoded + end, 0, whole - end);
  return whole;
}

// Decodes `part` of `parts` of an encoded record into the sections of a slab; gaps are not touched. The parts are equal runs of
// the blocks of packed sections, and of the bytes of other sections. Returns a Fault. Whatever `encoded` holds, no byte outside
// it and the sections is read or written.
VISMOE_API std::int32_t vismoe_lossless_decode(const std::uint8_t* encoded, std::uint64_t encoded_bytes, const Section* sections,
                                               std::uint64_t count, std::uint8_t* slab, std::uint64_t part, std::uint64_t parts,
                                               std::int32_t isa) {
  if (encoded_bytes < header_bytes(count)) return kBadHeader;
  std::uint64_t first_row[3];
  std::memcpy(first_row, encoded, kRowBytes);
  const std::uint64_t content_bytes = first_row[1];
  if (first_row[0] != kMagic || first_row[2] != count) return kBadHeader;
  if (content_bytes > encoded_bytes) return kOutOfBounds;
  for (std::uint64_t s = 0; s < count; s++) {
    const Encoded row = load<Encoded>(encoded + (1 + s) * kRowBytes);
    std::uint8_t* out = slab + sections[s].offset_bytes;
    const Fault fault =
        decode_section(encoded, content_bytes, row, sections[s], out, part, parts, decoder_of(static_cast<Isa>(isa)));
    if (fault != kNoFault) return fault;
  }
  return kNoFault;
}
