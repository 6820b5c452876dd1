// Products with weights in units of 64 outputs, in tiles (amx.h): activations are on the left, where they lie, weights
// on the right, unpacked into the cache.
//
// A row's bits do not depend on how many there are, though few rows, for which tiles do not pay, are multiplied with
// vectors. Where weights have fewer than 8 bits, activations are whole numbers but for a scale (rounded.h), so that the
// sums of tiles are exact: those of the even inputs, of the odd ones, and of pieces one after the other are up to 2^24.
// With weights of 8 bits they are not, and vectors sum them as tiles do (`EvenAndOdd`).
#pragma once
#include <vector>

#include "amx.h"
#include "rounded.h"

#if defined(WITH_TILES)

constexpr int64_t TILED_CHUNK = 128;  // rows of a task

// Has this thread take numbers that are too small for nothing, as tiles do.
class Flushing {
    const unsigned before = _mm_getcsr();

   public:
    Flushing() { _mm_setcsr(before | 0x8040); }
    Flushing(const Flushing&) = delete;
    ~Flushing() { _mm_setcsr(before); }
};

// Sums of even and of odd inputs. A tile adds both to nothing, which has a sign.
struct EvenAndOdd {
    Vec<float> even{}, odd{};
};

inline ALWAYS_INLINE void add(EvenAndOdd& sum, const Two& weight, const float* input) {
    sum.even = fused(weight.even, everywhere(input[0]), sum.even);
    sum.odd = fused(weight.odd, everywhere(input[1]), sum.odd);
}
inline ALWAYS_INLINE Vec<float> total_of(const EvenAndOdd& sum) { return Vec<float>{} + (sum.even + sum.odd); }

// Weights of a unit of 64 outputs are what `Unit` says:
//   inputs        of a tile, a piece;
//   groups()      of inputs that share a scale;  pieces()   of a group
//   unpack(piece, block, to)   [inputs / 2] vectors of two inputs of 16 outputs; asks for what comes later
//   factors(group, scale, least)   [UNIT] vectors
//   minimum       whether there are minima, which are multiplied with sums(), [rows, groups].
// A sum of products starts anew with each group, and is scaled and added to a total.

typedef __m512i Unpacked[UNIT][TILE_ROWS];  // unpacked weights of a piece

// Multiplies one piece after the other, a tile of rows with the blocks of a unit. A group's sums are stored while the
// next group is multiplied, and settled, which is scaled and added to the totals, while the one behind it is: these,
// and what is done `beside`, are work for different parts of a core. `size`: rows that are settled.
template <bool minimum, int size>
class Multiplying {
    const int64_t in_features, groups;
    Vec<float> sums[2][UNIT][TILE_ROWS] = {};

   public:
    struct Group {
        Vec<float>* totals = nullptr;                        // [UNIT, TILE_ROWS]
        const Vec<float>*scale = nullptr, *least = nullptr;  // [UNIT]
        const float* sum = nullptr;                          // of its inputs, where there are minima, by rows
        int64_t rows = 0;
    };

    // Of rows of `in_features` inputs in `groups` groups.
    Multiplying(int64_t in_features, int64_t groups) : in_features(in_features), groups(groups) {}

    // The next piece. `first`: of a group.
    template <class Beside>
    ALWAYS_INLINE void next(const bfloat16* input, const Unpacked& pairs, bool first, const Group& group,
                            Beside beside) {
        const Group done = stored;  // asm statements would have members read again
        Vec<float>*const fresh = sums[turn][0], *const settled = sums[turn ^ 1][0];
        const bool store = first && multiplied.totals, settles = first && done.totals;
        load_tile<LEFT>(input, in_features * 2);
        each<UNIT>([&](auto k) ALWAYS_INLINE {
            if (store) store_tile<SUMS + k>(fresh + k * TILE_ROWS);
            if (first) clear_tile<SUMS + k>();
            load_tile<RIGHT + k % 2>(pairs[k], 64);
            multiply_tiles<SUMS + k, LEFT, RIGHT + k % 2>();
            beside(k);
            if (settles) settle(done, settled, k);
        });
        if (first) turn_to(group);
    }

    // Those that were not settled yet.
    void finish() {
        for (int i = 0; i < 2; i++) {
            each<UNIT>([&](auto k) ALWAYS_INLINE {
                if (multiplied.totals) store_tile<SUMS + k>(sums[turn][k]);
                if (stored.totals) settle(stored, sums[turn ^ 1][0], k);
            });
            turn_to({});
        }
    }

   private:
    Group multiplied, stored;
    int turn = 0;

    void turn_to(const Group& group) { stored = multiplied, multiplied = group, turn ^= 1; }

    ALWAYS_INLINE void settle(const Group& group, const Vec<float>* sums, int k) const {
        Vec<float>* const totals = group.totals + k * TILE_ROWS;
        const Vec<float> scale = group.scale[k];
        each<size>([&](auto r) ALWAYS_INLINE {
            totals[r] = fused(sums[k * TILE_ROWS + r], scale, totals[r]);
            if constexpr (minimum) {
                const float sum = group.sum[std::min<int64_t>(r, group.rows - 1) * groups];
                totals[r] = fused(group.least[k], everywhere(sum), totals[r]);
            }
        });
    }
};

// Up to `size` rows, one tile of them: weights are unpacked while those of the piece before are multiplied.
template <class Unit, int size>
void multiply_few(const Unit& unit, const bfloat16* input, int64_t in_features, int64_t rows, const float* sum,
                  Vec<float>* totals) {
    constexpr int inputs = Unit::inputs, LIVING = 4;  // groups' factors, which are used until they are settled
    alignas(64) Unpacked pairs[2];
    Vec<float> scale[LIVING][UNIT], least[LIVING][UNIT];
    const int64_t pieces = unit.pieces(), groups = unit.groups(), all = groups * pieces;
    Multiplying<Unit::minimum, size> multiplying(in_features, groups);
    Shapes shapes;
    shapes.set(inputs / 2, rows);
    each<UNIT>([&](auto k) ALWAYS_INLINE { unit.unpack(0, k, pairs[0][k]); });
    for (int64_t group = 0, at = 0; group < groups; group++) {
        Vec<float>*own = scale[group % LIVING], *lowest = least[group % LIVING];
        unit.factors(group, own, lowest);
        for (int64_t piece = 0; piece < pieces; piece++, at++)
            multiplying.next(input + at * inputs, pairs[at % 2], piece == 0, {totals, own, lowest, sum + group, rows},
                             [&](auto k) ALWAYS_INLINE {
                                 if (at + 1 < all) unit.unpack(at + 1, k, pairs[(at + 1) % 2][k]);
                             });
    }
    multiplying.finish();
}

// More rows: tile after tile, with a few pieces that are unpacked for all of them.
template <class Unit>
void multiply_more(const Unit& unit, const bfloat16* input, int64_t in_features, int64_t rows, const float* sum,
                   Vec<float>* totals) {
    constexpr int inputs = Unit::inputs, SPAN = 4;
    alignas(64) Unpacked pairs[SPAN];
    Vec<float> scale[SPAN][UNIT], least[SPAN][UNIT];
    const int64_t pieces = unit.pieces(), groups = unit.groups(), span = SPAN / pieces;
    Multiplying<Unit::minimum, TILE_ROWS> multiplying(in_features, groups);
    Shapes shapes;
    for (int64_t first = 0; first < groups; first += span) {
        const int64_t end = std::min(first + span, groups);
        for (int64_t group = first, at = 0; group < end; group++) {
            unit.factors(group, scale[group - first], least[group - first]);
            for (int64_t piece = 0; piece < pieces; piece++, at++)
                each<UNIT>([&](auto k) ALWAYS_INLINE { unit.unpack(group * pieces + piece, k, pairs[at][k]); });
        }
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            const int64_t count = std::min<int64_t>(TILE_ROWS, rows - row);
            if (!shapes.are(count)) multiplying.finish(), shapes.set(inputs / 2, count);
            const bfloat16* from = input + row * in_features + first * pieces * inputs;
            for (int64_t group = first, at = 0; group < end; group++)
                for (int64_t piece = 0; piece < pieces; piece++, at++, from += inputs)
                    multiplying.next(from, pairs[at], piece == 0,
                                     {totals + row * UNIT, scale[group - first], least[group - first],
                                      sum + row * groups + group, count},
                                     [](auto) ALWAYS_INLINE {});
        }
        multiplying.finish();
    }
}

// Rows times the 64 outputs of a unit; `write(total, row, block)` is told the results.
template <class Unit, class Write>
void multiply_in_tiles(const Unit& unit, const bfloat16* input, int64_t in_features, int64_t from, int64_t rows,
                       Write write) {
    static thread_local std::vector<Vec<float>> room;
    room.assign((rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * UNIT, Vec<float>{});
    Vec<float>* const totals = room.data();
    const bfloat16* const first = input + from * in_features;
    const float* sum = nullptr;
    if constexpr (Unit::minimum) sum = unit.sums() + from * unit.groups();
    if (rows <= 8) multiply_few<Unit, 8>(unit, first, in_features, rows, sum, totals);
    else if (rows <= 16) multiply_few<Unit, 16>(unit, first, in_features, rows, sum, totals);
    else multiply_more(unit, first, in_features, rows, sum, totals);
    for (int64_t row = 0; row < rows; row++)
        for (int block = 0; block < UNIT; block++)
            write(totals[(row / TILE_ROWS * UNIT + block) * TILE_ROWS + row % TILE_ROWS], from + row, block);
}

// Rows that are multiplied faster with vectors.
template <class Call>
int64_t few_of(const Call& call) { return is_whole(call) ? 4 : 2; }

// A call, and what is made of its inputs: of the last rows, where they are few, whole numbers or floats, as if all rows
// were there. Where whole numbers are multiplied and there are more rows, all of them are `flat`.
template <class Call>
struct ForTiles : Call {
    const Rounded<int16_t>* rounded = nullptr;
    const float* widened = nullptr;
    const Flat* flat = nullptr;

    explicit ForTiles(const Call& call) : Call(call) {}
};

// Rooms for these.
class TileInputs {
    std::vector<Rounded<int16_t>> numbers;
    std::vector<float> floats;
    std::vector<Flat> flats;

   public:
    template <class Call>
    void make(std::vector<ForTiles<Call>>& all) {
        using Own = ForTiles<Call>;
        const auto rest = [](const Own& call) {
            const int64_t rows = call.rows % TILED_CHUNK;
            return rows <= few_of(call) ? rows : 0;
        };
        prepare(
            all, &Own::rounded, numbers,
            [&](const Own& call) { return is_whole(call) ? rest(call) * call.in_features / ROUNDED : 0; },
            [&](const Own& call, Rounded<int16_t>* to) { round_rows(call, call.rows - rest(call), rest(call), to); });
        prepare(
            all, &Own::widened, floats,
            [&](const Own& call) { return is_whole(call) ? 0 : rest(call) * call.in_features; },
            [&](const Own& call, float* to) {
                const auto* end = static_cast<const bfloat16*>(call.input) + call.rows * call.in_features;
                const int64_t count = rest(call) * call.in_features;
                for (int64_t i = 0; i < count; i += WIDE) store(load(end - count + i), to + i);
            });
        prepare(
            all, &Own::flat, flats,
            [](const Own& call) {
                return is_whole(call) && call.rows > few_of(call) ? call.rows * call.in_features / ROUNDED : 0;
            },
            [](const Own& call, Flat* to) { flatten_rows(call, to); });
        for (auto& one : all) {
            const int64_t before = (one.rows - rest(one)) * one.in_features;
            if (one.rounded) one.rounded -= before / ROUNDED;
            if (one.widened) one.widened -= before;
            if (one.flat) one.input = one.flat;
        }
    }

    void clear() { keep_little(numbers), keep_little(floats), keep_little(flats); }
};

// A product in bfloat16: few rows of a chunk as `Base` multiplies `few` with vectors, more of them in tiles.
template <class Base, auto few, class Unit, class Call>
class FewOrTiles : Base {
    const Call& call;

   public:
    explicit FewOrTiles(const Call& call) : Base(call, call.*few), call(call) {}

    int64_t tasks() const { return tasks_of(call.out_features, call.rows, TILED_CHUNK); }

    using Base::side;

    void several(int64_t first, int64_t end) const {
        in_units(call.rows, TILED_CHUNK, first, end, side(), [&](auto... task) { multiply(task...); });
    }

   private:
    void multiply(int64_t unit, int64_t some, int64_t from, int64_t count) const {
        const Flushing flushing;
        if (count <= few_of(call)) return Base::multiply(unit, some, from, count);
        multiply_in_tiles(Unit(call, unit), static_cast<const bfloat16*>(call.input), call.in_features, from, count,
                          [&](Vec<float> total, int64_t row, int block) {
                              Base::write(total, row, unit * OUTPUTS + block * LANES);
                          });
    }
};

// Of weights of `bits`: `Whole` multiplies whole numbers, `Summed` sums as tiles do.
template <int bits, class Whole, class Summed, class Unit, class Call>
using Tiled = std::conditional_t<bits == 8, FewOrTiles<Summed, &ForTiles<Call>::widened, Unit, ForTiles<Call>>,
                                 FewOrTiles<Whole, &ForTiles<Call>::rounded, Unit, ForTiles<Call>>>;
#endif
