// Products with the blocks of GGUF files, and rows of them; activations of bfloat16 or float32, float32
// sums.
//
// One token reads every weight once, so the time to read them is the least there can be, and what
// is done to a weight has to fit into it. So weights lie as formats.h says: in one stream, scales beside
// the numbers that they are of, 16 outputs in the lanes of a vector. The bits of two inputs are the index
// into a table of bfloat16 (VPERMW), and the product with two activations is one instruction
// (VDPBF16PS). Whole numbers up to 255 are exact in bfloat16: scales are multiplied after the sum over the
// inputs that share one. Minima are multiplied with the sum of these inputs, made once for all outputs.
// Where there is no such instruction, activations in bfloat16 are rounded to 16 bits (rounded.h), and where there are
// tiles, which multiply more than a few rows (tiled_units.h).
//
// Sums run over the inputs of a group in one order, then over the groups in theirs, however many rows
// there are: a row's result does not depend on what else is in the batch.
#include <vector>

#include "rounded_formats.h"
#include "tiled_units.h"

namespace {

// What Python packs, field by field.
struct RowsCall {
    const int64_t* index;   // [rows], of outputs
    void* out;              // [rows, in_features]
    const uint8_t* weight;
    int64_t rows, out_features, in_features, type, floats, threads;
};

struct PackCall {
    const uint8_t* blocks;  // [out_features, blocks of a row], as in a file
    uint8_t* weight;        // zeros
    int64_t in_features, out_features, type, threads;
};

// Pair `turn` of four, of a vector of outputs: `low` is where they are, of 4 bits or 8; `high` has the other bits.
template <Type type, int turn>
inline ALWAYS_INLINE Two two_of(const uint8_t* low, Words high) {
    using F = Format<type>;
    auto two = [](Integers even, Integers odd) ALWAYS_INLINE {
        return Two{__builtin_convertvector(even, Vec<float>), __builtin_convertvector(odd, Vec<float>)};
    };
    if constexpr (F::bits == 8) {
        const Words both = words(reinterpret_cast<const uint16_t*>(low + turn * UNIT * 2 * LANES));
        // 128 more and behind the exponent of 2^23, a byte is a float32 without a conversion.
        auto number = [](Words byte) ALWAYS_INLINE { return as<Vec<float>>(byte ^ 0x4b000080) - (0x1p23f + 128); };
        return {number(both & 0xff), number(both >> 8)};
    } else {
        Words bits = read<Words>(low) >> (turn * 4);
        Words even = bits & 15, odd = bits >> 16 & 15;
        if constexpr (F::bits > 4) {
            constexpr int more = F::bits - 4, mask = (1 << more) - 1;
            even |= (high >> (more * turn) & mask) << 4;
            odd |= (high >> (16 + more * turn) & mask) << 4;
        }
        return two(as<Integers>(even) - F::offset, as<Integers>(odd) - F::offset);
    }
}

#if defined(__AVX512BF16__)

// The numbers that 4, 5 or 6 bits mean, as bfloat16.
template <int bits, int offset>
struct Table {
    alignas(64) uint16_t values[64];
    Table() {
        for (int i = 0; i < 64; i++)
            values[i] = as<uint32_t>(float(i % (1 << bits) - offset)) >> 16;
    }
    __m512i half(int which) const { return _mm512_load_si512(values + 32 * which); }
};
template <int bits, int offset>
const Table<bits, offset> table;

// Each lane has two inputs of an output, the even one in its lower half.
typedef __m512bh Pair;

template <int shift>
inline ALWAYS_INLINE __m512i shifted(__m512i bits) {
    if constexpr (shift > 0) return _mm512_srli_epi16(bits, shift);
    else return _mm512_slli_epi16(bits, -shift);
}

typedef __m512i Bits;

// Pair `turn` of four, of a block: `low` is where they are, of 4 bits or 8; `high` has the other bits.
template <Type type, int turn>
inline ALWAYS_INLINE Pair numbers(const uint8_t* low, Bits high) {
    using F = Format<type>;
    if constexpr (F::bits == 8) {
        const uint8_t* from = low + turn * UNIT * 2 * LANES;
        auto part = [&](int i) ALWAYS_INLINE {
            return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(from + 16 * i)));
        };
        return _mm512_cvtne2ps_pbh(part(1), part(0));
    } else {
        const auto& values = table<F::bits, F::offset>;
        __m512i index = _mm512_srli_epi16(_mm512_loadu_si512(low), turn * 4);  // what is above does not matter
        if constexpr (F::bits == 4) {
            return (__m512bh)_mm512_permutexvar_epi16(index, values.half(0));
        } else {
            constexpr int more = F::bits - 4;
            __m512i mask = _mm512_set1_epi16(((1 << more) - 1) << 4);
            index = _mm512_ternarylogic_epi32(mask, shifted<more * turn - 4>(high), index, 0xca);
            if constexpr (F::bits == 5) return (__m512bh)_mm512_permutexvar_epi16(index, values.half(0));
            else return (__m512bh)_mm512_permutex2var_epi16(values.half(0), index, values.half(1));
        }
    }
}

template <int count>
inline Bits without(Bits bits) { return _mm512_srli_epi16(bits, count); }

#else

typedef Two Pair;
typedef Words Bits;

template <Type type, int turn>
inline ALWAYS_INLINE Pair numbers(const uint8_t* low, Bits high) { return two_of<type, turn>(low, high); }

// Each half of a word less its lowest bits; what comes from above is not looked at.
template <int count>
inline Bits without(Bits bits) { return bits >> count; }

#endif

// The sums of the inputs that share a scale, [rows, groups of a row], where there are minima.
struct Summed : LinearCall {
    const float* sums = nullptr;

    explicit Summed(const LinearCall& call) : LinearCall(call) {}
};

constexpr int SUMMED = 32;  // inputs of a group, wherever there are minima

template <class T>
void sum_groups(const LinearCall& call, float* sums) {
    const int64_t groups = call.in_features / SUMMED;
    Tasks(call.rows, std::min(call.threads, call.rows * call.in_features / WORTH + 1), [&](int64_t row) {
        for (int64_t i = row * groups; i < (row + 1) * groups; i++) {
            const T* from = static_cast<const T*>(call.input) + i * SUMMED;
            Vec<float> sum{};
            for (int j = 0; j < SUMMED; j += WIDE) sum += load(from + j);
            float total = 0;
            for (int j = 0; j < WIDE; j++) total += sum[j];
            sums[i] = total;
        }
    });
}

// Many rows of float32: the numbers of a group are made floats once for all of them.
template <Type type>
class Many {
    using F = Format<type>;
    const Summed& call;
    const float* const inputs;
    const int64_t records;

   public:
    explicit Many(const Summed& call)
        : call(call), inputs(static_cast<const float*>(call.input)), records(call.in_features / F::inputs) {}

    void multiply(int64_t unit, int64_t from, int64_t count) const {
        for (int first = 0; first < UNIT * PARTS; first += ACROSS) {
            const uint8_t* record = call.weight + unit * records * F::record;
            Vec<float> total[CHUNK * ACROSS] = {};
            for (int64_t at = 0; at < records * F::groups; at++) {
                const int g = at % F::groups;
                const uint8_t* group = record + F::head + g * F::part;
                Vec<float> weight[F::group * ACROSS], scale[ACROSS], minimum[ACROSS];
                unpack(group + F::factors, first, weight);
                each<ACROSS>([&](auto i) ALWAYS_INLINE {
                    scale[i] = scale_of<type>(record, group, (first + i) * WIDE);
                    if constexpr (F::minimum) minimum[i] = minimum_of<type>(record, group, (first + i) * WIDE);
                });
                const float* input = inputs + from * call.in_features + at * F::group;
                const float* sum_of = call.sums + from * records * F::groups + at;
                for (int64_t row = 0; row < count; row += MANY) {
                    const int64_t there = std::min<int64_t>(MANY, count - row);
                    const float* rows[MANY];
                    for (int64_t r = 0; r < MANY; r++)  // the last again where there is none
                        rows[r] = input + (row + std::min(r, there - 1)) * call.in_features;
                    Vec<float> sums[MANY * ACROSS];
                    multiply_many<F::group>(weight, rows, sums);
                    for (int64_t r = 0; r < there; r++)
                        each<ACROSS>([&](auto i) ALWAYS_INLINE {
                            Vec<float>& all = total[(row + r) * ACROSS + i];
                            all = fused(sums[r * ACROSS + i], scale[i], all);
                            if constexpr (F::minimum)
                                all = fused(minimum[i], everywhere(sum_of[(row + r) * records * F::groups]), all);
                        });
                }
                if (g == F::groups - 1) record += F::record;
            }
            for (int64_t i = 0; i < count * ACROSS; i++) {
                int64_t output = unit * OUTPUTS + (first + i % ACROSS) * WIDE;
                float* out = static_cast<float*>(call.out) + (from + i / ACROSS) * call.out_features;
                write_outputs(total[i], output, call.out_features, static_cast<const float*>(call.bias), out);
            }
        }
    }

   private:
    // The numbers of a group as floats, [inputs, `ACROSS` vectors of outputs].
    ALWAYS_INLINE void unpack(const uint8_t* low, int first, Vec<float>* weight) const {
        constexpr int above = F::bits == 8 ? 0 : F::bits - 4;
        constexpr int wide = F::bits == 8 ? 2 * WIDE : 4 * WIDE;
        Words high[ACROSS] = {};
        if constexpr (above > 0)
            each<ACROSS>([&](auto i) ALWAYS_INLINE { high[i] = read<Words>(low + F::low + (first + i) * WIDTH); });
        low += first * wide;
        for (int at = 0; at < F::group; at += 8, weight += 8 * ACROSS, low += OUTPUTS * (F::bits == 8 ? 8 : 4))
            each<ACROSS>([&](auto i) ALWAYS_INLINE {
                each<4>([&](auto turn) ALWAYS_INLINE {
                    const Two both = two_of<type, turn>(low + i * wide, high[i]);
                    weight[2 * turn * ACROSS + i] = both.even, weight[(2 * turn + 1) * ACROSS + i] = both.odd;
                });
                if constexpr (above > 0) high[i] >>= 4 * above;
            });
    }
};

// `Sum`: of the products of a group; `Input`: what the activations are read as.
template <Type type, class T, class Sum = Vec<float>, class Input = T>
class Linear {
    using F = Format<type>;
    static_assert(!F::minimum || F::group == SUMMED);
    static constexpr bool AS_TILES = !std::is_same_v<Sum, Vec<float>>;  // of 8 bits
    const Summed& call;
    const Input* const input;
    const int64_t records;

   public:
    explicit Linear(const Summed& call) : Linear(call, static_cast<const T*>(call.input)) {}
    Linear(const Summed& call, const Input* input)
        : call(call), input(input), records(call.in_features / F::inputs) {}

    int64_t tasks() const { return tasks_of(call.out_features, call.rows, CHUNK); }

    int64_t side() const { return call.rows <= ONE_TILE ? beside(call.rows) : 1; }

    void several(int64_t first, int64_t end) const {
        in_units(call.rows, CHUNK, first, end, side(), [&](int64_t unit, int64_t some, int64_t from, int64_t count) {
            if constexpr (std::is_same_v<T, float>)
                if (call.rows > FEW) return Many<type>(call).multiply(unit, from, count);
            multiply(unit, some, from, count);
        });
    }

   protected:
    void multiply(int64_t unit, int64_t some, int64_t from, int64_t count) const {
        in_tiles<blocks_for>(Sizes(), from, count,
                             [&](auto size, auto blocks, int64_t rows, int block, int64_t row, bool first) {
                                 side_by_side<beside(size)>(unit, some, [&](auto side, int64_t at) {
                                     multiply<size, blocks, side>(rows, at, block, row, first);
                                 });
                             });
    }

    void write(Vec<float> total, int64_t row, int64_t output) const {
        T* out = static_cast<T*>(call.out) + row * call.out_features;
        write_outputs(total, output, call.out_features, static_cast<const T*>(call.bias), out);
    }

   private:
    static constexpr int FEW = 8;  // rows of float32, up to which weights are not unpacked for all at once
    static constexpr int ONE_TILE = std::is_same_v<T, float> ? 1 : 2;  // so many rows read no weight again

    // Rows of a tile.
    using Floats = std::conditional_t<PAIRS, std::integer_sequence<int, 1, 4, 8>, std::integer_sequence<int, 1, 4>>;
    using Pairwise = std::conditional_t<AS_TILES, std::integer_sequence<int, 1, 2>,
                                        std::integer_sequence<int, 1, 2, 4, 8>>;
    using Sizes = std::conditional_t<std::is_same_v<T, bfloat16>, Pairwise, Floats>;

    template <int rows, int blocks, int side>
    void multiply(int count, int64_t unit, int block, int64_t from, bool first) const {
        constexpr int parts = blocks * PARTS, across = side * parts;  // vectors of outputs, of a unit and of all
        const int64_t groups = records * F::groups, stride = records * F::record;
        const uint8_t* record = call.weight + unit * stride;
        const Input* row[rows];
        const float* sum_of[rows];
        each<rows>([&](auto i) ALWAYS_INLINE {
            int64_t place = from + std::min<int>(i, count - 1);  // the last again where there is none
            row[i] = input + place * call.in_features;
            sum_of[i] = call.sums + place * groups;
        });
        Vec<float> total[rows * across];
        each<rows * across>([&](auto i) ALWAYS_INLINE { total[i] = Vec<float>{}; });
        for (int64_t at = 0; at < groups; at++) {
            const int g = at % F::groups;
            const uint8_t* group = record + F::head + g * F::part;
            if (first && g == F::groups - 1)
                each<side>([&](auto u) ALWAYS_INLINE { ask_ahead<side>(group + u * stride + F::part, F::head); });
            Sum sums[rows * across];
            each<rows * across>([&](auto i) ALWAYS_INLINE { sums[i] = Sum{}; });
            add_group<rows, parts, side>(group, block * PARTS, row, at * F::group, first, sums);
            each<across>([&](auto part) ALWAYS_INLINE {
                const int64_t before = part / parts * stride;
                const int output = block * LANES + part % parts * WIDE;
                Vec<float> scale = scale_of<type>(record + before, group + before, output), minimum{};
                if constexpr (F::minimum) minimum = minimum_of<type>(record + before, group + before, output);
                each<rows>([&](auto i) ALWAYS_INLINE {
                    Vec<float>& all = total[i * across + part];
                    all = fused(total_of(sums[i * across + part]), scale, all);
                    if constexpr (F::minimum) all = fused(minimum, everywhere(sum_of[i][at]), all);
                });
            });
            if (g == F::groups - 1) record += F::record;
        }
        each<rows * across>([&](auto i) ALWAYS_INLINE {
            const int part = i % across;
            const int64_t output = ((unit + part / parts) * UNIT + block) * LANES + part % parts * WIDE;
            if (i / across < count) write(total[i], from + i / across, output);
        });
    }

    // Of the outputs from vector `from` of `side` units on. `ask`: for weights before their turn, a piece at a time.
    template <int rows, int parts, int side>
    ALWAYS_INLINE void add_group(const uint8_t* group, int from, const Input* const* row, int64_t input, bool ask,
                                 Sum* sums) const {
        constexpr int above = F::bits == 8 ? 0 : F::bits - 4;
        constexpr int wide = F::bits == 8 ? 2 * WIDE : 4 * WIDE;  // bytes of a vector and a turn, or a step
        constexpr int piece = F::part / (F::group / 8);
        const int64_t stride = records * F::record;
        Bits high[side * parts];
        each<side * parts>([&](auto at) ALWAYS_INLINE {
            const uint8_t* own = group + at / parts * stride + F::factors + F::low;
            if constexpr (above > 0) high[at] = read<Bits>(own + (from + at % parts) * WIDTH);
        });
        const uint8_t* low = group + F::factors + from * wide;
        for (int i = 0; i < F::group; i += 8) {
            each<side>([&](auto u) ALWAYS_INLINE {
                if (ask) ask_ahead<side>(group + u * stride + i / 8 * piece, piece);
                each<4>([&](auto turn) ALWAYS_INLINE {
                    each<parts>([&](auto part) ALWAYS_INLINE {
                        const uint8_t* own = low + u * stride + part * wide;
                        const auto weight = [&] {
                            if constexpr (AS_TILES) return two_of<type, turn>(own, Words{});
                            else return numbers<type, turn>(own, high[u * parts + part]);
                        }();
                        each<rows>([&](auto r) ALWAYS_INLINE {
                            add(sums[(r * side + u) * parts + part], weight, row[r] + input + i + 2 * turn);
                        });
                    });
                });
            });
            if constexpr (above > 0)
                each<side * parts>([&](auto at) ALWAYS_INLINE { high[at] = without<4 * above>(high[at]); });
            low += OUTPUTS * (F::bits == 8 ? 8 : 4);  // bytes of eight inputs
        }
    }
};

#if defined(WITH_TILES)

// A unit's weights for products in tiles (tiled_units.h).
template <Type type>
class Unit {
    using F = Format<type>;
    const Summed& call;
    const uint8_t* const weight;
    const int64_t count;

   public:
    static constexpr int inputs = F::group;
    static constexpr bool minimum = F::minimum;

    Unit(const Summed& call, int64_t unit)
        : call(call), weight(call.weight + unit * (call.in_features / F::inputs) * F::record),
          count(call.in_features / F::group) {}

    int64_t groups() const { return count; }
    int64_t pieces() const { return 1; }
    const float* sums() const { return call.sums; }

    // Asks for weights before their turn.
    ALWAYS_INLINE void unpack(int64_t at, int block, __m512i* to) const {
        constexpr int above = F::bits == 8 ? 0 : F::bits - 4;
        constexpr int wide = F::bits == 8 ? 2 * WIDE : 4 * WIDE;  // bytes of a block and a turn, or a step
        constexpr int lines = F::part / 64, asks = F::group / 8 * UNIT;
        const uint8_t* const group = group_of(at);
        const uint8_t* low = group + F::factors + block * wide;
        Bits high;
        if constexpr (above > 0) high = read<Bits>(group + F::factors + F::low + block * WIDTH);
        each<F::group / 8>([&](auto i) ALWAYS_INLINE {
            for (int line = i * UNIT + block; line < lines; line += asks) ask_for(group + line * 64 + AHEAD);
            each<4>([&](auto turn) ALWAYS_INLINE { to[i * 4 + turn] = (__m512i)numbers<type, turn>(low, high); });
            if constexpr (above > 0) high = without<4 * above>(high);
            low += OUTPUTS * (F::bits == 8 ? 8 : 4);  // bytes of eight inputs
        });
    }

    ALWAYS_INLINE void factors(int64_t at, Vec<float>* scale, Vec<float>* least) const {
        const uint8_t *const record = record_of(at), *const group = group_of(at);
        if (at % F::groups == 0) ask_for(record + F::record + AHEAD, F::head);
        each<UNIT>([&](auto block) ALWAYS_INLINE {
            scale[block] = scale_of<type>(record, group, block * LANES);
            if constexpr (F::minimum) least[block] = minimum_of<type>(record, group, block * LANES);
        });
    }

   private:
    const uint8_t* record_of(int64_t at) const { return weight + at / F::groups * F::record; }
    const uint8_t* group_of(int64_t at) const { return record_of(at) + F::head + at % F::groups * F::part; }
};

template <Type type>
using TiledLinear = Tiled<Format<type>::bits, RoundedLinear<type, int16_t>,
                          Linear<type, bfloat16, EvenAndOdd, float>, Unit<type>, Summed>;

#endif

template <Type type, class T>
void gather(const RowsCall& call) {
    using F = Format<type>;
    const int64_t records = call.in_features / F::inputs;
    Tasks(call.rows, std::min(call.threads, call.rows * call.in_features / WORTH + 1), [&](int64_t row) {
        int64_t output = call.index[row];
        // Read alone; Place also writes.
        uint8_t* record = const_cast<uint8_t*>(call.weight) + output / OUTPUTS * records * F::record;
        T* out = static_cast<T*>(call.out) + row * call.in_features;
        for (int64_t r = 0; r < records; r++, record += F::record, out += F::inputs) {
            float found[F::inputs];
            Place<type>{record, int(output % OUTPUTS)}.get(found);
            for (int i = 0; i < F::inputs; i += WIDE) store(load(found + i), out + i);
        }
    });
}

// Whether all scales are finite.
template <Type type>
bool pack(const PackCall& call) {
    using F = Format<type>;
    const int64_t records = call.in_features / F::inputs;
    const int64_t units = (call.out_features + OUTPUTS - 1) / OUTPUTS;
    std::atomic<bool> finite{true};
    Tasks(units, call.threads, [&](int64_t unit) {
        for (int64_t r = 0; r < records; r++)
            for (int i = 0; i < OUTPUTS && unit * OUTPUTS + i < call.out_features; i++) {
                const uint8_t* block = call.blocks + ((unit * OUTPUTS + i) * records + r) * F::block;
                uint8_t* record = call.weight + (unit * records + r) * F::record;
                const Decoded<type> decoded(block);
                if ((decoded.d & 0x7c00) == 0x7c00 || (decoded.m & 0x7c00) == 0x7c00) finite = false;
                Place<type>{record, i}.put(decoded);
            }
    });
    return finite;
}

template <class Own>
struct Product {
    const Own& call;

    explicit Product(const Own& call) : call(call) {}
    int64_t tasks() const {
        int64_t count = 0;
        as([&](auto linear) { count = linear.tasks(); });
        return count;
    }
    int64_t side() const {
        int64_t side = 1;
        as([&](auto linear) { side = linear.side(); });
        return side;
    }
    void several(int64_t from, int64_t to) const {
        as([=](auto linear) { linear.several(from, to); });
    }

   private:
    template <class What>
    void as(What what) const {
        with_type(call.type, [&](auto type) {
            if constexpr (std::is_same_v<Own, Summed>) {
                if constexpr (PAIRS)
                    if (!call.floats) return what(Linear<type, bfloat16>(call));
                what(Linear<type, float>(call));
            }
#if defined(WITH_TILES)
            else what(TiledLinear<type>(call));
#endif
        });
    }
};

bool has_minimum(const LinearCall& call) {
    bool found = false;
    with_type(call.type, [&](auto type) { found = Format<type>::minimum; });
    return found;
}

// `wanted(call)`: whether sums are needed where there are minima.
template <class Own, class Wanted>
void products(std::vector<Own>& all, Wanted wanted) {
    static thread_local std::vector<const Own*> each;
    static thread_local std::vector<float> room;
    prepare(
        all, &Own::sums, room,
        [&](const Own& call) {
            return has_minimum(call) && wanted(call) ? call.rows * (call.in_features / SUMMED) : 0;
        },
        [](const Own& call, float* to) {
            if (call.floats) sum_groups<float>(call, to);
            else sum_groups<bfloat16>(call, to);
        });
    each.clear();
    for (auto& one : all) each.push_back(&one);
    together<Product<Own>>(each.data(), each.size());
    keep_little(room);
}

template <class Own>
std::vector<Own>& copies(const LinearCall* const* calls, int64_t count) {
    static thread_local std::vector<Own> all;
    all.clear();
    for (int64_t i = 0; i < count; i++) all.emplace_back(Summed(*calls[i]));
    return all;
}

void products(const LinearCall* const* calls, int64_t count) {
#if defined(WITH_TILES)
    if (!calls[0]->floats && has_tiles()) {
        static thread_local TileInputs inputs;
        auto& all = copies<ForTiles<Summed>>(calls, count);
        inputs.make(all);
        products(all, [](const Summed& call) { return call.rows > few_of(call); });
        return inputs.clear();
    }
#endif
    products(copies<Summed>(calls, count), [](const Summed&) { return true; });
}

}  // namespace

extern "C" {
// Each returns whether it can: it knows the type, there are the rows, all scales are finite.
bool gguf_linears(const LinearCall* const* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!with_type(calls[i]->type, [](auto) {})) return false;
    // Of those with other activations than the first, a product is computed as if it were alone.
    const bool alike = std::all_of(calls, calls + count, [&](auto one) { return one->floats == calls[0]->floats; });
    if (!alike) {
        for (int64_t i = 0; i < count; i++) gguf_linears(calls + i, 1);
    } else if (PAIRS || calls[0]->floats) {
        products(calls, count);
    } else {
        rounded_together<RoundedProduct<int16_t>, int16_t>(calls, count);
    }
    return true;
}
bool gguf_linear(const LinearCall* call) { return gguf_linears(&call, 1); }
bool gguf_rows(const RowsCall* call) {
    for (int64_t row = 0; row < call->rows; row++)
        if (call->index[row] < 0 || call->index[row] >= call->out_features) return false;
    return with_type(call->type, [&](auto type) {
        if (call->floats) gather<type, float>(*call);
        else gather<type, bfloat16>(*call);
    });
}
bool gguf_pack(const PackCall* call) {
    bool finite = false;
    with_type(call->type, [&](auto type) { finite = pack<type>(*call); });
    return finite;
}
}
