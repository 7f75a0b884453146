// What the encoder and decoders of lossless records share. vismoe/formats/lossless.py defines the bytes.
//
// Functions are in an anonymous namespace: every instruction set has its own, and the linker must not mix them.

#pragma once

#include <cstdint>
#include <cstring>

namespace vismoe::lossless {

constexpr std::uint64_t kChunkWeights = 64, kChunkBytes = 2 * kChunkWeights;
constexpr std::uint64_t kPlaneBytes = 3 * 8;  // the codes of a chunk: three words of one bit per weight
constexpr std::uint64_t kBlockChunks = 64, kBlockWeights = kBlockChunks * kChunkWeights;
constexpr std::uint64_t kTailBytes = 64;
constexpr std::uint64_t kAlignment = 64;

// The parts of a packed section.
template <class Byte>
struct Parts {
  Byte* table;      // [8] exponents by code
  Byte* before;     // uint32 [blocks], any alignment: escapes before each block
  Byte* mantissas;  // [chunks, 64] sign << 7 | mantissa
  Byte* planes;     // uint64 [chunks, 3], any alignment
  Byte* escapes;
};

// A packed section that lies inside its record, with kTailBytes readable bytes behind it.
struct Packed {
  Parts<const std::uint8_t> parts;
  std::uint64_t weights, escapes;
};

// What the decoder of an instruction set gets per step.
struct Chunk {
  std::uint64_t plane[3];
  std::uint64_t escaped;  // bit i: the exponent of the weight stored at i is in the list
  const std::uint8_t* mantissas;
  const std::uint8_t* escapes;  // as many as `escaped` has bits; kTailBytes more are readable
};

// Decodes blocks first .. last - 1 into out [weights] bfloat16. False if the escapes of a block do not match its codes. Whatever
// the bytes are, no byte outside the section, its tail and `out` is touched.
using DecodeBlocks = bool(const Packed& packed, std::uint64_t first, std::uint64_t last, std::uint8_t* out);
DecodeBlocks decode_blocks_portable;
#if defined(__x86_64__)
DecodeBlocks decode_blocks_avx2, decode_blocks_avx512, decode_blocks_avx512_near;  // near: into the caches
#endif

// The weights first .. last of a section of a record whose header was checked, which has `weights` of them: in place where they are
// stored as they are, otherwise decoded into `out`, with others of the same blocks before and behind them: fewer than
// kBlockWeights each. Null for a damaged record.
const std::uint8_t* weights_of(const std::uint8_t* record, std::uint64_t section, std::uint64_t weights, std::uint64_t first,
                               std::uint64_t last, std::uint8_t* out);

// Packs bfloat16 words, at any alignment, if that makes them smaller: returns the section's bytes and sets `escapes`. Otherwise
// returns 0 and writes nothing.
std::uint64_t pack(const std::uint8_t* words, std::uint64_t weights, std::uint8_t* section, std::uint64_t& escapes);

namespace {

constexpr std::uint64_t round_up(std::uint64_t n, std::uint64_t to) { return (n + to - 1) / to * to; }
constexpr std::uint64_t chunks_of(std::uint64_t weights) { return (weights + kChunkWeights - 1) / kChunkWeights; }
constexpr std::uint64_t blocks_of(std::uint64_t weights) { return (chunks_of(weights) + kBlockChunks - 1) / kBlockChunks; }
constexpr std::uint64_t head_bytes(std::uint64_t weights) { return round_up(8 + 4 * blocks_of(weights), kAlignment); }

// Bytes of a packed section without its escapes.
constexpr std::uint64_t fixed_bytes(std::uint64_t weights) {
  return head_bytes(weights) + chunks_of(weights) * (kChunkWeights + kPlaneBytes);
}

template <class Byte>
Parts<Byte> parts_of(Byte* section, std::uint64_t weights) {
  Byte* const mantissas = section + head_bytes(weights);
  Byte* const planes = mantissas + chunks_of(weights) * kChunkWeights;
  return {section, section + 8, mantissas, planes, planes + chunks_of(weights) * kPlaneBytes};
}

template <class T>
T load(const std::uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline std::uint64_t escapes_before(const Packed& packed, std::uint64_t block) {
  return block == blocks_of(packed.weights) ? packed.escapes : load<std::uint32_t>(packed.parts.before + 4 * block);
}

// The index in its chunk of the weight that is stored at `position`.
constexpr unsigned weight_at(unsigned position) { return (position & 8) * 4 + (position & 48) / 2 + (position & 7); }

// Puts the exponents of escaped weights into a decoded chunk.
inline void patch(const Chunk& chunk, std::uint8_t* out) {
  const std::uint8_t* escape = chunk.escapes;
  for (std::uint64_t rest = chunk.escaped; rest; rest &= rest - 1) {
    std::uint8_t* at = out + 2 * weight_at(__builtin_ctzll(rest));
    const std::uint16_t word = (load<std::uint16_t>(at) & 0x807f) | *escape++ << 7;
    std::memcpy(at, &word, 2);
  }
}

// A DecodeBlocks. A Decoder is made from a table; it is called with a chunk and the address of its 64 weights.
template <class Decoder>
bool decode_blocks(const Packed& packed, std::uint64_t first, std::uint64_t last, std::uint8_t* out) {
  const Decoder decode(packed.parts.table);
  const std::uint64_t chunks = chunks_of(packed.weights);
  for (std::uint64_t block = first; block < last; block++) {
    std::uint64_t escape = escapes_before(packed, block);
    const std::uint64_t end = escapes_before(packed, block + 1);
    if (end > packed.escapes) return false;
    for (std::uint64_t i = block * kBlockChunks; i < chunks && i < (block + 1) * kBlockChunks; i++) {
      Chunk chunk;
      std::memcpy(chunk.plane, packed.parts.planes + i * kPlaneBytes, kPlaneBytes);
      chunk.escaped = chunk.plane[0] & chunk.plane[1] & chunk.plane[2];
      chunk.mantissas = packed.parts.mantissas + i * kChunkWeights;
      chunk.escapes = packed.parts.escapes + escape;
      escape += __builtin_popcountll(chunk.escaped);
      if (escape > end) return false;
      const std::uint64_t rest_bytes = 2 * packed.weights - i * kChunkBytes;
      if (rest_bytes >= kChunkBytes) {
        decode(chunk, out + i * kChunkBytes);
      } else {
        std::uint8_t whole[kChunkBytes];
        decode(chunk, whole);
        std::memcpy(out + i * kChunkBytes, whole, rest_bytes);
      }
    }
    if (escape != end) return false;
  }
  return true;
}

}  // namespace
}  // namespace vismoe::lossless
