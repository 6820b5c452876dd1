// Attention of many query tokens a sequence, over its pages.
//
// A task is a block of queries, of all heads that share a key/value head; it goes over blocks of keys
// and keeps the largest score, the sum of weights and the weighted values so far (FlashAttention-2,
// Dao 2023). The lanes of a vector are queries. So keys and values are read as they lie, one number for
// all lanes (tiles of a processor that has them want both in an order of theirs), and maxima and sums need nothing
// across lanes. What is behind a query or before its window is left out by tiles and hidden within them.
//
// Blocks of keys, and pieces of these, begin at multiples of their length, counted from the sequence's first token. A
// lane adds up key by key, or piece by piece: what is hidden adds 0. So the result of a query depends neither on the
// threads, nor on the batch, nor on the chunks in which a prompt is read.
#pragma once
#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "arithmetic.h"
#include "memory.h"
#include "threads.h"

namespace {

constexpr int64_t KEYS = 128;              // of a block
constexpr int64_t LANES_OF_A_TASK = 192;   // queries times heads: keys are read once for all
constexpr int TALL = 8;                    // keys whose scores are looked at together
#if defined(__AVX512F__)
constexpr int BROAD = 3;  // vectors of lanes that are taken together: all sums fit into the registers
#else
constexpr int BROAD = 1;
#endif

// What Python packs, field by field. Strides are in elements; those within heads are 1.
struct PromptsCall {
    const void *query, *key, *value;  // pools are [pages, page_size, kv_heads, size]
    void* out;                        // [tokens, heads, value_size], contiguous
    int64_t heads, kv_heads, key_size, value_size, threads;
    double scaling;
    int64_t query_token, query_head;
    int64_t key_page, key_head, key_slot, value_page, value_head, value_slot;
    // See PageTables and Blocks. Sequence i has the queries from starts[i] on; those with up to `few` are
    // left out, unless some of them see later keys. No ends: all look back only.
    const int32_t *table, *first, *lengths, *starts, *ends;
    int64_t table_row, page_size, window;
    int64_t sequences, tokens, columns, pages, few;
};

template <class T, class A>
class Prompts {
    using C = typename A::C;
    using Step = typename A::Step;
    static constexpr int lanes = Vector<C>::lanes, width = A::width;
    static_assert(KEYS % A::piece == 0 && KEYS % A::scored == 0 && A::scored % TALL == 0);

    const PromptsCall& call;
    const int64_t group, block;            // heads that share keys; tokens of a task
    const int64_t steps, values, vectors;  // of a key and numbers of a value, filled up; of a task's lanes
    const bool keys_lie, values_lie;
    int64_t tasks = 0, products = 0;
    int64_t* before;  // tasks before those of each sequence
    std::atomic<int64_t> next{0};

    // What one thread works on.
    struct Desk {
        const Step *keys[KEYS + TALL], *values[KEYS];
        Step *queries, *weights, *key_rows, *value_rows, *lines;
        C *scores, *out, *most, *total, *at, *behind;
        const T *next_keys[KEYS], *next_values[KEYS];  // of the block after this one
        int64_t coming;                                // how many of them there are
    };

    // A task, and the keys that its queries see.
    struct Task {
        int64_t sequence, head, token, count, position, begin, end;
    };

   public:
    explicit Prompts(const PromptsCall& call)
        : call(call), group(call.heads / call.kv_heads),
          block(std::max<int64_t>(1, LANES_OF_A_TASK / group)),
          steps(A::steps(call.key_size)), values((call.value_size + A::tall - 1) / A::tall * A::tall),
          vectors((block * group + lanes - 1) / lanes), keys_lie(A::lies(call.key_size)),
          values_lie(A::whole && values == call.value_size) {}

    // Whether all sequences lie within the memory that there is; if not, nothing was done.
    bool run() {
        static thread_local Memory memory;
        before = reinterpret_cast<int64_t*>(memory.hold((call.sequences + 1) * sizeof *before));
        for (int64_t i = 0; i < call.sequences; i++) {
            if (!inside(i)) return false;
            before[i] = tasks;
            const int64_t count = call.starts[i + 1] - call.starts[i];
            if (is_left_out(i)) continue;
            tasks += (count + block - 1) / block * call.kv_heads;
            products += count * (call.lengths[i] - call.first[i]);
        }
        before[call.sequences] = tasks;
        products *= call.heads * (call.key_size + call.value_size);
        int64_t threads = std::min({call.threads, tasks, products / WORTH + 1});
        auto each = [](void* self) { static_cast<Prompts*>(self)->work(); };
        if (threads > 1) GOMP_parallel(each, this, threads, 0);
        else each(this);
        return true;
    }

   private:
    bool inside(int64_t i) const {
        const int64_t start = call.starts[i], after = call.starts[i + 1];
        const int64_t first = call.first[i], end = call.lengths[i];
        if (start < 0 || after <= start || after > call.tokens) return false;
        for (int64_t n = 0; call.ends && n < after - start; n++) {
            const int64_t behind = call.ends[start + n];
            if (behind <= end - (after - start) + n || behind > end) return false;
        }
        if (is_left_out(i)) return true;
        if (first < 0 || end - (after - start) < first) return false;
        const int64_t last = (end - 1 - first) / call.page_size;
        const int32_t* pages = call.table + i * call.table_row;
        return last < call.columns &&
               std::all_of(pages + (oldest(i, end - (after - start)) - first) / call.page_size,
                           pages + last + 1,
                           [&](int32_t page) { return page >= 0 && page < call.pages; });
    }

    bool is_left_out(int64_t i) const {
        const int64_t start = call.starts[i], count = call.starts[i + 1] - start;
        if (count > call.few) return false;
        for (int64_t n = 0; call.ends && n < count; n++)
            if (call.ends[start + n] > call.lengths[i] - count + n + 1) return false;
        return true;
    }

    // Behind the last key that the query of a token, at this position, sees.
    int64_t behind(int64_t token, int64_t position) const {
        return call.ends ? call.ends[token] : position + 1;
    }

    // Behind the last key that some of a task's queries from `first` to `last` see, and that all of them see.
    int64_t farthest(const Task& task, int64_t first, int64_t last) const {
        if (!call.ends) return task.position + last + 1;
        return *std::max_element(call.ends + task.token + first, call.ends + task.token + last + 1);
    }
    int64_t nearest(const Task& task, int64_t first, int64_t last) const {
        if (!call.ends) return task.position + first + 1;
        return *std::min_element(call.ends + task.token + first, call.ends + task.token + last + 1);
    }

    // The first key that a query at this position sees.
    int64_t oldest(int64_t i, int64_t position) const {
        const int64_t first = call.first[i];
        return call.window ? std::max(first, position - call.window + 1) : first;
    }

    void work() {
        static thread_local Memory memory;
        const int64_t all = vectors * lanes;
        size_t size[] = {sizeof(Desk), steps * all * sizeof(Step), KEYS * BROAD * lanes * sizeof(C),
                         values * all * sizeof(C), all * sizeof(C), all * sizeof(C), all * sizeof(C),
                         all * sizeof(C),
                         keys_lie ? 0 : KEYS * steps * sizeof(Step),
                         values_lie ? 0 : KEYS / width * values * sizeof(Step),
                         lanes * room() * sizeof(Step)};
        size_t total = 0;
        for (size_t& one : size) total += one = (one + 63) / 64 * 64;
        char* at = memory.hold(total);
        auto take = [&, i = 0]() mutable { return std::exchange(at, at + size[i++]); };
        Desk& desk = *reinterpret_cast<Desk*>(take());
        desk.queries = reinterpret_cast<Step*>(take());
        desk.scores = reinterpret_cast<C*>(take());
        desk.weights = reinterpret_cast<Step*>(desk.scores);  // each in the place of its score
        desk.out = reinterpret_cast<C*>(take());
        desk.most = reinterpret_cast<C*>(take());
        desk.total = reinterpret_cast<C*>(take());
        desk.at = reinterpret_cast<C*>(take());
        desk.behind = reinterpret_cast<C*>(take());
        desk.key_rows = reinterpret_cast<Step*>(take());
        desk.value_rows = reinterpret_cast<Step*>(take());
        desk.lines = reinterpret_cast<Step*>(take());
        for (int64_t lane = 0; lane < all; lane++) {
            desk.at[lane] = lane / group;
            desk.behind[lane] = lane / group + 1;
        }
        [[maybe_unused]] const typename A::Ready ready;
        int64_t i = 0;
        for (int64_t number; (number = next.fetch_add(1)) < tasks;) {
            while (number >= before[i + 1]) i++;
            attend(desk, task(i, number - before[i]));
        }
    }

    // Those that see most come first, so that no thread is left with a long one.
    Task task(int64_t i, int64_t nth) const {
        const int64_t count = call.starts[i + 1] - call.starts[i];
        const int64_t blocks = (count + block - 1) / block;
        const int64_t from = (blocks - 1 - nth / call.kv_heads) * block;
        const int64_t position = call.lengths[i] - count + from, own = std::min(block, count - from);
        Task found = {i, nth % call.kv_heads, call.starts[i] + from, own, position, oldest(i, position), 0};
        found.end = farthest(found, 0, own - 1);
        return found;
    }

    void attend(Desk& desk, const Task& task) const {
        if (task.count > 1 && !is_finite(task)) {
            for (int64_t n = 0; n < task.count; n++) {
                const int64_t position = task.position + n;
                attend(desk, {task.sequence, task.head, task.token + n, 1, position,
                              oldest(task.sequence, position), behind(task.token + n, position)});
            }
            return;
        }
        const int64_t used = (task.count * group + lanes - 1) / lanes;
        fetch_queries(desk, task);
        for (int64_t lane = 0; call.ends && lane < used * lanes; lane++) {
            const int64_t n = std::min(lane / group, task.count - 1);
            desk.behind[lane] = call.ends[task.token + n] - task.position;
        }
        std::fill_n(desk.most, used * lanes, std::numeric_limits<C>::lowest());
        std::fill_n(desk.total, used * lanes, C{});
        std::fill_n(desk.out, used * lanes * values, C{});
        for (int64_t start = task.begin / KEYS * KEYS; start < task.end; start += KEYS) {
            point(desk, task, start);
            look_ahead(desk, task, start + KEYS);
            for (int64_t vector = 0; vector < used; vector += BROAD)
                by_breadth<BROAD>(std::min<int64_t>(BROAD, used - vector), [&](auto broad) {
                    tile<broad>(desk, task, start, vector);
                });
        }
        for (int64_t vector = 0; vector < used; vector++) write(desk, task, vector, used);
    }

    // Whether the values that some of its queries see and others do not are finite. A weight of 0 hides no
    // others, so these queries go one by one.
    bool is_finite(const Task& task) const {
        return are_finite(task, task.begin, oldest(task.sequence, task.position + task.count - 1)) &&
               are_finite(task, nearest(task, 0, task.count - 1), task.end);
    }

    bool are_finite(const Task& task, int64_t from, int64_t upto) const {
        for (const T* rows[KEYS]; from < upto; from += KEYS) {
            const int64_t count = std::min(upto - from, KEYS);
            locate(rows, call.value, call.value_page, call.value_head, call.value_slot, task, from, 0, count);
            for (int64_t k = 0; k < count; k++)
                if (!all_finite(rows[k], call.value_size)) return false;
        }
        return true;
    }

    template <int most, class What>
    static void by_breadth(int64_t count, What what) {
        if (count == most) return what(std::integral_constant<int, most>());
        if constexpr (most > 1) by_breadth<most - 1>(count, what);
    }

    // Where the numbers of a vector of lanes are: tiles of BROAD vectors follow one another, the last may be less.
    static int64_t place(int64_t vector, int64_t height, int64_t used, int64_t* apart) {
        const int64_t before = vector / BROAD * BROAD;
        *apart = std::min<int64_t>(BROAD, used - before) * lanes;
        return (before * height + vector - before) * lanes;
    }

    // A key's steps, with room for whole vectors.
    int64_t room() const { return (steps + lanes - 1) / lanes * lanes; }

    void fetch_queries(Desk& desk, const Task& task) const {
        const int64_t count = task.count * group, used = (count + lanes - 1) / lanes;
        for (int64_t vector = 0; vector < used; vector++) {
            for (int64_t lane = 0; lane < lanes; lane++) {
                const int64_t real = std::min(vector * lanes + lane, count - 1);  // the last again: nobody reads it
                const T* from = static_cast<const T*>(call.query) +
                                (task.token + real / group) * call.query_token +
                                (task.head * group + real % group) * call.query_head;
                A::key(from, call.key_size, desk.lines + lane * room(), steps);
            }
            int64_t apart;
            Step* to = desk.queries + place(vector, steps, used, &apart);
            for (int64_t i = 0; i < steps; i += lanes) {
                Vec<Step> some[lanes];
                each<lanes>([&](auto r) ALWAYS_INLINE { some[r] = read<Vec<Step>>(desk.lines + r * room() + i); });
                turn(some);
                for (int64_t r = 0; r < std::min<int64_t>(lanes, steps - i); r++)
                    std::memcpy(to + (i + r) * apart, &some[r], sizeof some[r]);
            }
        }
    }

    // Where the keys and values of a block are. Of those that no query of the task sees nothing is read.
    void point(Desk& desk, const Task& task, int64_t start) const {
        const int64_t from = std::max(task.begin, start) - start;
        const int64_t upto = std::min(task.end - start, KEYS);
        const T *keys[KEYS] = {}, *rows[KEYS + width] = {};
        locate(keys, call.key, call.key_page, call.key_head, call.key_slot, task, start, from, upto);
        locate(rows, call.value, call.value_page, call.value_head, call.value_slot, task, start, from, upto);
        if constexpr (A::tiles) {
            for (int64_t k = from / A::piece * A::piece; k < upto; k += A::piece) {
                for (int64_t at = k; at < k + A::piece; at++) {
                    if (keys[at]) A::key(keys[at], call.key_size, desk.key_rows + at * steps, steps);
                    else std::fill_n(desk.key_rows + at * steps, steps, 0);
                }
                A::values(rows + k, call.value_size, desk.value_rows + k / width, KEYS / width);
            }
            return;
        }
        for (int64_t k = from; k < upto; k++) {
            Step* made = desk.key_rows + k * steps;
            if (!keys_lie) A::key(keys[k], call.key_size, made, steps);
            desk.keys[k] = keys_lie ? reinterpret_cast<const Step*>(keys[k]) : made;
        }
        std::fill(desk.keys, desk.keys + from, desk.keys[from]);
        std::fill(desk.keys + upto, desk.keys + KEYS + TALL, desk.keys[from]);
        for (int64_t g = from / width; g * width < upto; g++) {
            Step* made = desk.value_rows + g * values;
            if (!values_lie) A::value(rows + g * width, call.value_size, made, values);
            desk.values[g] = values_lie ? reinterpret_cast<const Step*>(rows[g]) : made;
        }
    }

    // Where the next block is. Its rows lie apart, so that no processor guesses them: they are fetched while
    // this one is computed.
    void look_ahead(Desk& desk, const Task& task, int64_t start) const {
        desk.coming = std::clamp<int64_t>(task.end - start, 0, KEYS);
        if (!desk.coming) return;
        locate(desk.next_keys, call.key, call.key_page, call.key_head, call.key_slot, task, start, 0,
               desk.coming);
        locate(desk.next_values, call.value, call.value_page, call.value_head, call.value_slot, task, start, 0,
               desk.coming);
    }

    static ALWAYS_INLINE void fetch(const T* const* rows, int64_t from, int64_t upto, int64_t size) {
        for (int64_t k = from; k < upto; k++) ask_for(rows[k], size * sizeof(T));
    }

    void locate(const T** to, const void* pool, int64_t of_page, int64_t of_head, int64_t of_slot,
                const Task& task, int64_t start, int64_t from, int64_t upto) const {
        const T* base = static_cast<const T*>(pool) + task.head * of_head;
        const int32_t* pages = call.table + task.sequence * call.table_row;
        const int64_t token = start + from - call.first[task.sequence];
        int64_t page = token / call.page_size, slot = token % call.page_size;
        for (int64_t k = from; k < upto; page++, slot = 0)
            for (; slot < call.page_size && k < upto; slot++, k++)
                to[k] = base + pages[page] * of_page + slot * of_slot;
    }

    // One block of keys for neighbouring vectors of lanes.
    template <int broad>
    void tile(Desk& desk, const Task& task, int64_t start, int64_t vector) const {
        const int64_t first = vector * lanes / group;
        const int64_t last = std::min((vector + broad) * lanes - 1, task.count * group - 1) / group;
        const int64_t position = task.position + first;
        const int64_t begin = std::max(oldest(task.sequence, position), start) - start;
        const int64_t end = std::min(farthest(task, first, last) - start, KEYS);
        if (begin >= end) return;
        const int64_t low = begin / A::piece * A::piece, high = (end + A::piece - 1) / A::piece * A::piece;
        // Keys from `clear` to before `upto` are seen by all lanes.
        const int64_t clear = std::max(begin, oldest(task.sequence, task.position + last) - start);
        const int64_t upto = std::min(end, nearest(task, first, last) - start);
        C* most = desk.most + vector * lanes;
        Vec<C> old[broad], now[broad];
        each<broad>([&](auto v) ALWAYS_INLINE { now[v] = old[v] = load(most + v * lanes); });
        const C factor = call.scaling * 1.4426950408889634;
        const Step* queries = desk.queries + vector * lanes * steps;
        const auto score_tile = [&]([[maybe_unused]] int64_t k) ALWAYS_INLINE {
            if constexpr (A::tiles)
                A::template score<broad>(desk.key_rows + k * steps, queries, steps, desk.scores + k * broad * lanes);
        };
        score_tile(low);
        for (int64_t k = low; k < high; k += TALL) {
            Vec<C> sum[TALL * broad];
            if (!vector) {
                const int64_t rows = std::min(k + TALL, desk.coming);
                fetch(desk.next_keys, k, rows, call.key_size);
                fetch(desk.next_values, k, rows, call.value_size);
            }
            C* to = desk.scores + k * broad * lanes;
            if constexpr (A::tiles) {  // the next tile is multiplied while this one is looked at
                if (k % A::scored == 0 && k + A::scored < high) score_tile(k + A::scored);
                each<TALL * broad>([&](auto i) ALWAYS_INLINE { sum[i] = load(to + i * lanes); });
            } else {
                score<broad>(queries, desk.keys + k, sum);
            }
            each<TALL * broad>([&](auto i) ALWAYS_INLINE { sum[i] *= factor; });
            if (k < clear || k + TALL > upto)
                hide<broad>(sum, desk.at + vector * lanes, desk.behind + vector * lanes,
                            start + k - task.position, start + begin - task.position);
            const int64_t rows = std::min<int64_t>(TALL, high - k);
            each<TALL>([&](auto r) ALWAYS_INLINE {
                if (r >= rows) return;
                each<broad>([&](auto v) ALWAYS_INLINE {
                    Vec<C> s = sum[r * broad + v];
                    now[v] = s > now[v] ? s : now[v];
                    store(s, to + (r * broad + v) * lanes);
                });
            });
        }
        C* total = desk.total + vector * lanes;
        Vec<C> kept[broad], added[broad];
        each<broad>([&](auto v) ALWAYS_INLINE {
            kept[v] = power_of_2(old[v] - now[v]);
            added[v] = Vec<C>{};
            store(now[v], most + v * lanes);
        });
        for (int64_t k = low; k < high; k += width)
            each<broad>([&](auto v) ALWAYS_INLINE {
                Vec<C> weight[width];
                each<width>([&](auto w) ALWAYS_INLINE {
                    const C* from = desk.scores + ((k + w) * broad + v) * lanes;
                    weight[w] = power_of_2(load(from) - now[v]);
                    added[v] += weight[w];
                });
                A::weights(weight, desk.weights + (k / width * broad + v) * lanes);
            });
        each<broad>([&](auto v) ALWAYS_INLINE {
            store(fused(load(total + v * lanes), kept[v], added[v]), total + v * lanes);
        });
        C* out = desk.out + vector * lanes * values;
        if constexpr (A::tiles)
            A::template weigh<broad>(desk.value_rows + low / width, KEYS / width, values,
                                     desk.weights + low / width * broad * lanes, (high - low) / width, kept, out);
        else
            for (int64_t d = 0; d < values; d += A::tall)
                weigh<broad>(desk, low / width, high / width, d, kept, out + d * broad * lanes);
    }

    template <int broad>
    ALWAYS_INLINE void score(const Step* queries, const Step* const* keys, Vec<C>* sum) const {
        const Step* key[TALL];
        each<TALL>([&](auto r) ALWAYS_INLINE { key[r] = keys[r]; });
        each<TALL * broad>([&](auto i) ALWAYS_INLINE { sum[i] = Vec<C>{}; });
        for (int64_t i = 0; i < steps; i++, queries += broad * lanes)
            each<TALL>([&](auto r) ALWAYS_INLINE {
                each<broad>([&](auto v) ALWAYS_INLINE {
                    Vec<C>& one = sum[r * broad + v];
                    one = A::add(one, queries + v * lanes, key[r] + i);
                });
            });
    }

    // Scores of keys that a lane does not see become -infinity, also of those before `from`, which stand
    // there to fill a step up. Positions are counted from the task's first: `own` of the first key, `at` of
    // the lanes, `behind` the last key that each sees.
    template <int broad>
    void hide(Vec<C>* sum, const C* at, const C* behind, int64_t own, int64_t from) const {
        const Vec<C> none = Vec<C>{} - std::numeric_limits<C>::infinity();
        each<broad>([&](auto v) ALWAYS_INLINE {
            const Vec<C> lane = load(at + v * lanes), after = load(behind + v * lanes);
            each<TALL>([&](auto r) ALWAYS_INLINE {
                const int64_t key = own + r;
                Vec<C>& one = sum[r * broad + v];
                if (key < from) one = none;
                one = after <= everywhere(C(key)) ? none : one;
                if (call.window) one = lane >= everywhere(C(key + call.window)) ? none : one;
            });
        });
    }

    // out = out × kept + weights × values, for `A::tall` numbers of values.
    template <int broad>
    ALWAYS_INLINE void weigh(const Desk& desk, int64_t from, int64_t upto, int64_t d,
                             const Vec<C>* kept, C* out) const {
        Vec<C> sum[A::tall * broad];
        each<A::tall * broad>([&](auto i) ALWAYS_INLINE { sum[i] = load(out + i * lanes) * kept[i % broad]; });
        const Step* weights = desk.weights + from * broad * lanes;
        for (int64_t g = from; g < upto; g++, weights += broad * lanes) {
            const Step* value = desk.values[g] + d;
            each<A::tall>([&](auto r) ALWAYS_INLINE {
                each<broad>([&](auto v) ALWAYS_INLINE {
                    Vec<C>& one = sum[r * broad + v];
                    one = A::add(one, weights + v * lanes, value + r);
                });
            });
        }
        each<A::tall * broad>([&](auto i) ALWAYS_INLINE { store(sum[i], out + i * lanes); });
    }

    // A sum may be -0 or 0, by what other lanes see: it becomes 0.
    void write(const Desk& desk, const Task& task, int64_t vector, int64_t used) const {
        int64_t apart;
        const C* from = desk.out + place(vector, values, used, &apart);
        const Vec<C> total = load(desk.total + vector * lanes);
        const Vec<C> factor = total == 0 ? Vec<C>{} : 1 / total;
        const int64_t first = vector * lanes, count = std::min<int64_t>(lanes, task.count * group - first);
        for (int64_t d = 0; d < call.value_size; d += lanes) {
            Vec<C> some[lanes];
            each<lanes>([&](auto i) ALWAYS_INLINE {
                some[i] = d + i < values ? load(from + (d + i) * apart) * factor + Vec<C>{} : Vec<C>{};
            });
            turn(some);
            for (int64_t lane = 0; lane < count; lane++) {
                C own[lanes];
                store(some[lane], own);
                const int64_t token = task.token + (first + lane) / group;
                const int64_t head = task.head * group + (first + lane) % group;
                narrow(own, std::min<int64_t>(lanes, call.value_size - d),
                       static_cast<T*>(call.out) + (token * call.heads + head) * call.value_size + d);
            }
        }
    }
};

template <class T>
bool prompts(const PromptsCall* call) {
#if defined(WITH_TILES)
    if constexpr (std::is_same<T, bfloat16>::value)
        if (has_tiles()) return Prompts<T, InTiles>(*call).run();
#endif
    return Prompts<T, typename Computed<T>::type>(*call).run();
}

}  // namespace
