// CRC-32C (Castagnoli; RFC 3720, appendix B.4) of records.
//
// A checksum is a polynomial over GF(2) modulo P with its bits reflected: bit 31 is the coefficient of x^0. Appending bytes gives
// (checksum before) * x^(8 * bytes) + (checksum of those bytes alone), so several runs of bytes can be processed in parallel.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "api.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr std::uint32_t kReflectedP = 0x82f63b78;  // P without its x^32

constexpr std::uint32_t times_x(std::uint32_t a) { return a >> 1 ^ (a & 1 ? kReflectedP : 0); }

// a * x^power modulo P.
constexpr std::uint32_t shifted(std::uint32_t a, std::size_t power) {
  while (power--) a = times_x(a);
  return a;
}

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// [k][b]: the checksum of byte b followed by k zero bytes.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t b = 0; b < 256; b++)
    for (std::size_t k = 0; k < 8; k++) tables[k][b] = shifted(b, 8 * (k + 1));
  return tables;
}

constexpr Tables tables = make_tables();

std::uint64_t load_u64(const std::uint8_t* from) {
  std::uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::uint32_t extend_portable(std::uint32_t crc, const std::uint8_t* data, std::size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    const std::uint64_t word = load_u64(data) ^ crc;
    crc = 0;
    for (int i = 0; i < 8; i++) crc ^= tables[7 - i][word >> (8 * i) & 255];
  }
  for (; bytes; data++, bytes--) crc = crc >> 8 ^ tables[0][(crc ^ *data) & 255];
  return crc;
}

#if defined(__x86_64__)
#define WITH_CRC __attribute__((target("sse4.2,pclmul")))

constexpr std::size_t kLaneBytes = 4096;  // three lanes run interleaved, because the instruction has a latency of three cycles

// x^(8 bytes - 33) modulo P: its carry-less product with a register is a 64-bit word whose checksum is the shifted register.
constexpr std::uint32_t shift_by(std::size_t bytes) { return shifted(0x80000000, 8 * bytes - 33); }

WITH_CRC std::uint64_t shift(std::uint64_t crc, std::uint32_t by) {
  const __m128i a = _mm_cvtsi64_si128(static_cast<long long>(crc)), b = _mm_cvtsi32_si128(static_cast<int>(by));
  return _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_clmulepi64_si128(a, b, 0))));
}

WITH_CRC std::uint32_t extend_hardware(std::uint32_t start, const std::uint8_t* data, std::size_t bytes) {
  static constexpr std::uint32_t by_one = shift_by(kLaneBytes), by_two = shift_by(2 * kLaneBytes);
  std::uint64_t crc = start;
  for (; bytes >= 3 * kLaneBytes; data += 3 * kLaneBytes, bytes -= 3 * kLaneBytes) {
    std::uint64_t second = 0, third = 0;
    for (std::size_t i = 0; i < kLaneBytes; i += 8) {
      crc = _mm_crc32_u64(crc, load_u64(data + i));
      second = _mm_crc32_u64(second, load_u64(data + kLaneBytes + i));
      third = _mm_crc32_u64(third, load_u64(data + 2 * kLaneBytes + i));
    }
    crc = shift(crc, by_two) ^ shift(second, by_one) ^ third;
  }
  for (; bytes >= 8; data += 8, bytes -= 8) crc = _mm_crc32_u64(crc, load_u64(data));
  for (; bytes; data++, bytes--) crc = _mm_crc32_u8(static_cast<std::uint32_t>(crc), *data);
  return static_cast<std::uint32_t>(crc);
}
#endif

}  // namespace

// The checksum of data [bytes], continued from the checksum of the preceding bytes (0: none). `portable` does not use the
// processor's CRC instructions.
VISMOE_API std::uint32_t vismoe_crc32c(const std::uint8_t* data, std::size_t bytes, std::uint32_t before, int portable) {
#if defined(__x86_64__)
  if (!portable && __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
    return ~extend_hardware(~before, data, bytes);
  }
#endif
  (void)portable;
  return ~extend_portable(~before, data, bytes);
}
