// A linear layer whose weights are integers of 4 or 8 bits with one scale a group; activations of
// bfloat16, of 8 bits also of float32; float32 sums.
//
// One token reads every weight once, so the time to read them is the least there can be, and what
// is done to a weight has to fit into it. Hence the layout: a block is 16 outputs, one a 32-bit
// lane, and a lane holds neighbouring inputs, even ones in its lower half and odd ones in its
// higher, so that two of them are one operand of VDPBF16PS. Of 4 bits, shifting brings the next pair
// into place, where the 4 lowest bits of each half are an index into a table of bfloat16. Of 8 bits,
// a byte is put behind the exponent of 2^23, which makes it a float32 without a conversion; bfloat16 is
// its upper half, exact for a whole number of 8 bits. Where there is no such instruction, activations in bfloat16
// are rounded to 16 bits (rounded.h), and where there are tiles, which multiply more than a few rows (tiled_units.h).
//
// Sums run over the inputs of a group in one order, then over the groups in theirs, however many
// rows there are: a row's result does not depend on what else is in the batch.
#include "rounded_groups.h"
#include "tiled_units.h"

namespace {

constexpr int inputs_of(int bits) { return 32 / bits; }  // of a step

// The lowest bits of each lane, less half of their range.
template <int bits>
inline ALWAYS_INLINE Vec<float> whole(Words stored) {
    const float offset = 0x1p23f + (1 << (bits - 1));
    return as<Vec<float>>((stored & ((1 << bits) - 1)) | 0x4b000000) - offset;
}

// Pair `turn` of a step's inputs.
template <int bits, int turn>
inline ALWAYS_INLINE Two two(Words packed) {
    return {whole<bits>(packed >> (bits * turn)), whole<bits>(packed >> (16 + bits * turn))};
}

#if defined(__AVX512BF16__)

// The values of a nibble, twice: bit 4 of an index belongs to the next nibble and must not matter.
struct Table {
    alignas(64) uint16_t values[32];
    Table() {
        for (int i = 0; i < 32; i++) values[i] = as<uint32_t>(float(i % 16 - 8)) >> 16;
    }
};
const Table table;

template <int bits, int turn>
inline ALWAYS_INLINE __m512bh numbers(Words packed, const bfloat16*) {
    if constexpr (bits == 4) {
        __m512i index = _mm512_srli_epi16(as<__m512i>(packed), 4 * turn);
        return (__m512bh)_mm512_permutexvar_epi16(index, _mm512_load_si512(table.values));
    } else {
        Two both = two<bits, turn>(packed);
        return as<__m512bh>((as<Words>(both.even) >> 16) | (as<Words>(both.odd) & 0xffff0000));
    }
}

#endif

template <int bits, int turn>
inline ALWAYS_INLINE Two numbers(Words packed, const float*) { return two<bits, turn>(packed); }

#if defined(WITH_TILES)

// A unit's weights for products in tiles.
template <int bits>
class Unit {
    const uint8_t* const weight;
    const bfloat16* const scale;
    const int64_t count, of_sum, of_scale;  // pieces, sums with a scale

    static int64_t summed(const Call& call) { return is_whole(call) ? sharing(call) : call.group_size; }

   public:
    static constexpr int inputs = 32, steps = inputs / inputs_of(bits);
    static constexpr bool minimum = false;

    Unit(const Call& call, int64_t unit)
        : weight(call.weight + unit * (call.in_features / inputs) * steps * UNIT * BYTES),
          scale(call.scale + unit * (call.in_features / call.group_size) * OUTPUTS),
          count(call.in_features / summed(call)), of_sum(summed(call) / inputs),
          of_scale(call.group_size / summed(call)) {}

    int64_t groups() const { return count; }
    int64_t pieces() const { return of_sum; }

    ALWAYS_INLINE void unpack(int64_t at, int block, __m512i* to) const {
        const uint8_t* from = weight + (at * steps * UNIT + block) * BYTES;
        each<steps>([&](auto step) ALWAYS_INLINE {
            ask_for(from + AHEAD);
            const Words packed = read<Words>(from);
            each<inputs_of(bits) / 2>([&](auto turn) ALWAYS_INLINE {
                to[step * inputs_of(bits) / 2 + turn] = (__m512i)numbers<bits, turn>(
                    packed, static_cast<const bfloat16*>(nullptr));
            });
            from += UNIT * BYTES;
        });
    }

    ALWAYS_INLINE void factors(int64_t group, Vec<float>* factor, Vec<float>*) const {
        const bfloat16* from = scale + group / of_scale * OUTPUTS;
        ask_for(reinterpret_cast<const char*>(from) + AHEAD / 6, OUTPUTS * sizeof *from);
        each<UNIT>([&](auto block) ALWAYS_INLINE { factor[block] = load(from + block * LANES); });
    }
};

#endif

// sums += the products of one group: of each row with each part of a block of `side` units, of `of_unit` bytes each.
// `ask`: for weights before their turn.
template <int bits, int rows, int parts, int side, class T, class Sum>
inline ALWAYS_INLINE void add_group(const uint8_t* weight, int64_t of_unit, const T* input, int64_t stride,
                                    int64_t steps, bool ask, Sum* sums) {
    for (int64_t step = 0; step < steps; step++) {
        each<side>([&](auto u) ALWAYS_INLINE {
            const uint8_t* own = weight + u * of_unit;
            if (ask) ask_ahead<side>(own, UNIT * BYTES);
            Words packed[parts];
            each<parts>([&](auto part) ALWAYS_INLINE { packed[part] = read<Words>(own + part * WIDTH); });
            each<inputs_of(bits) / 2>([&](auto turn) ALWAYS_INLINE {
                decltype(numbers<bits, 0>(packed[0], input)) value[parts];
                each<parts>([&](auto part) ALWAYS_INLINE { value[part] = numbers<bits, turn>(packed[part], input); });
                each<rows>([&](auto r) ALWAYS_INLINE {
                    each<parts>([&](auto part) ALWAYS_INLINE {
                        add(sums[(r * side + u) * parts + part], value[part], input + r * stride + 2 * turn);
                    });
                });
            });
        });
        weight += UNIT * BYTES;
        input += inputs_of(bits);
    }
}

// `Sum`: of the products of a group, or of as many inputs as a tile has; `Input`: what the activations are read as.
template <int bits, class T, class Sum = Vec<float>, class Input = T>
class Linear {
    const Call& call;
    const Input* const input;
    const int64_t steps, groups;  // steps are those of a group

   public:
    explicit Linear(const Call& call) : Linear(call, static_cast<const T*>(call.input)) {}
    Linear(const Call& call, const Input* input)
        : call(call), input(input), steps(call.group_size / inputs_of(bits)),
          groups(call.in_features / call.group_size) {}

    int64_t tasks() const { return tasks_of(call.out_features, call.rows, CHUNK); }

    int64_t side() const { return beside(call.rows); }

    void several(int64_t first, int64_t end) const {
        in_units(call.rows, CHUNK, first, end, side(), [&](auto... task) { multiply(task...); });
    }

   protected:
    void multiply(int64_t unit, int64_t some, int64_t from, int64_t count) const {
        in_tiles<blocks_for>(Sizes(), from, count,
                             [&](auto size, auto blocks, int64_t, int block, int64_t row, bool first) {
                                 side_by_side<beside(size)>(unit, some, [&](auto side, int64_t at) {
                                     multiply<size, blocks, side>(at, block, row, first);
                                 });
                             });
    }

    void write(Vec<float> total, int64_t row, int64_t output) const {
        T* out = static_cast<T*>(call.out) + row * call.out_features;
        write_outputs(total, output, call.out_features, static_cast<const T*>(call.bias), out);
    }

   private:
    static constexpr bool AS_TILES = !std::is_same_v<Sum, Vec<float>>;
    using All = std::conditional_t<PAIRS, std::integer_sequence<int, 1, 2, 3, 4, 5, 6, 7, 8>,
                                   std::integer_sequence<int, 1, 2, 3, 4>>;
    using Sizes = std::conditional_t<AS_TILES, std::integer_sequence<int, 1, 2>, All>;

    template <int rows, int blocks, int side>
    void multiply(int64_t unit, int block, int64_t from, bool first) const {
        constexpr int parts = blocks * PARTS, across = side * parts;  // vectors of outputs, of a unit and of all
        const int64_t of_unit = groups * steps * UNIT * BYTES, scales = groups * OUTPUTS;
        const uint8_t* weight = call.weight + unit * of_unit + block * BYTES;
        const bfloat16* scale = call.scale + unit * scales + block * LANES;
        const Input* own = input + from * call.in_features;
        const int64_t together = AS_TILES ? 32 / inputs_of(bits) : steps;
        Vec<float> total[rows * across];
        each<rows * across>([&](auto i) ALWAYS_INLINE { total[i] = Vec<float>{}; });
        for (int64_t group = 0; group < groups; group++) {
            if (first) each<side>([&](auto u) ALWAYS_INLINE { ask_ahead<side, 6>(scale + u * scales, OUTPUTS); });
            Vec<float> all[rows * across];
            each<rows * across>([&](auto i) ALWAYS_INLINE { all[i] = Vec<float>{}; });
            for (int64_t step = 0; step < steps; step += together) {
                Sum sums[rows * across];
                each<rows * across>([&](auto i) ALWAYS_INLINE { sums[i] = Sum{}; });
                add_group<bits, rows, parts, side>(weight, of_unit, own, call.in_features, together, first, sums);
                each<rows * across>([&](auto i) ALWAYS_INLINE {
                    if constexpr (AS_TILES) all[i] += total_of(sums[i]);
                    else all[i] = sums[i];
                });
                weight += together * UNIT * BYTES;
                own += together * inputs_of(bits);
            }
            each<across>([&](auto part) ALWAYS_INLINE {
                const Vec<float> factor = load(scale + part / parts * scales + part % parts * WIDE);
                each<rows>([&](auto r) ALWAYS_INLINE {
                    total[r * across + part] = fused(all[r * across + part], factor, total[r * across + part]);
                });
            });
            scale += OUTPUTS;
        }
        each<rows * across>([&](auto i) ALWAYS_INLINE {
            const int part = i % across;
            const int64_t output = ((unit + part / parts) * UNIT + block) * LANES + part % parts * WIDE;
            write(total[i], from + i / across, output);
        });
    }
};

#if defined(WITH_TILES)

template <int bits>
using TiledLinear =
    Tiled<bits, RoundedLinear<bits, int16_t>, Linear<bits, bfloat16, EvenAndOdd, float>, Unit<bits>, Call>;

struct TiledProduct {
    const ForTiles<Call>& call;

    explicit TiledProduct(const ForTiles<Call>& call) : call(call) {}
    int64_t tasks() const { return call.bits == 4 ? TiledLinear<4>(call).tasks() : TiledLinear<8>(call).tasks(); }
    int64_t side() const { return beside(call.rows); }
    void several(int64_t from, int64_t to) const {
        if (call.bits == 4) TiledLinear<4>(call).several(from, to);
        else TiledLinear<8>(call).several(from, to);
    }
};

void tiled_together(const Call* const* calls, int64_t count) {
    static thread_local std::vector<ForTiles<Call>> all;
    static thread_local std::vector<const ForTiles<Call>*> each;
    static thread_local TileInputs inputs;
    all.clear(), each.clear();
    for (int64_t i = 0; i < count; i++) all.emplace_back(*calls[i]);
    for (auto& one : all) each.push_back(&one);
    inputs.make(all);
    together<TiledProduct>(each.data(), count);
    inputs.clear();
}

#endif

// Of 4 bits there are no products with float32.
bool is_known(const Call& call) { return call.bits == 8 || !call.floats; }

struct Product {
    const Call& call;

    explicit Product(const Call& call) : call(call) {}
    int64_t tasks() const {
        return as([](auto linear) { return linear.tasks(); });
    }
    int64_t side() const { return beside(call.rows); }
    void several(int64_t from, int64_t to) const {
        as([=](auto linear) { return linear.several(from, to), 0; });
    }

   private:
    template <class What>
    int64_t as(What what) const {
        if constexpr (PAIRS) {
            if (call.bits == 4) return what(Linear<4, bfloat16>(call));
            if (!call.floats) return what(Linear<8, bfloat16>(call));
        }
        return what(Linear<8, float>(call));
    }
};

}  // namespace

extern "C" {
// Each returns whether it can.
bool groupwise_linears(const Call* const* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!is_known(*calls[i])) return false;
    const bool alike = std::all_of(calls, calls + count, [&](auto one) { return one->floats == calls[0]->floats; });
    if (!alike) {
        for (int64_t i = 0; i < count; i++) groupwise_linears(calls + i, 1);
#if defined(WITH_TILES)
    } else if (!calls[0]->floats && has_tiles()) {
        tiled_together(calls, count);
#endif
    } else if (PAIRS || calls[0]->floats) {
        together<Product>(calls, count);
    } else {
        rounded_together<RoundedProduct<int16_t>, int16_t>(calls, count);
    }
    return true;
}
bool groupwise_linear(const Call* call) { return groupwise_linears(&call, 1); }
}
