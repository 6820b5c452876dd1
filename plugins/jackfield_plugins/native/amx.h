// Products in tiles (Intel's AMX): 16 rows of 32 numbers in bfloat16 on the left with as many of 16 columns on the
// right are one instruction (TDPBF16PS), where one with vectors (VDPBF16PS) takes two numbers of a row. Left ones lie
// row by row; of right ones a row has two of each column.
//
// A tile's sums are those of the even inputs and those of the odd ones, each in its order, then both together; numbers
// too small to be normal are nothing.
#pragma once
#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define WITH_TILES
#include <sys/syscall.h>
#include <unistd.h>

// Whether this process may use tiles, for which Linux wants to be asked.
inline bool has_tiles() {
    constexpr long ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool has = !syscall(SYS_arch_prctl, ask, tile_data);
    return has;
}

constexpr int TILE_ROWS = 16;
constexpr int SUMS = 0, LEFT = 4, RIGHT = 5;  // tiles: four, one and two

// Of the compiler's own functions, those of GCC 12 do not say what memory they read.
template <int tile>
inline ALWAYS_INLINE void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline ALWAYS_INLINE void store_tile(void* to, int64_t stride = 64) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline ALWAYS_INLINE void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }
template <int sums, int left, int right>
inline ALWAYS_INLINE void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}

// The shapes of tiles while it lives: sums [rows, columns], left [rows, pairs], right [pairs, columns].
class Shapes {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};  // of a row
        uint8_t rows[16] = {};
    } shapes;

   public:
    Shapes() = default;
    Shapes(const Shapes&) = delete;
    ~Shapes() { asm volatile("tilerelease"); }

    bool are(int64_t rows) const { return shapes.rows[SUMS] == rows; }

    void set(int pairs, int64_t rows, int64_t columns = TILE_ROWS) {
        for (int tile = SUMS; tile < RIGHT + 2; tile++) {
            shapes.bytes[tile] = 4 * (tile == LEFT ? pairs : columns);
            shapes.rows[tile] = tile < RIGHT ? rows : pairs;
        }
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
};
#endif
