// Copies the keys and values of a step's tokens to their places in the pools.
#include <cstdint>
#include <cstring>

namespace {

// [tokens, heads, bytes]: strides are in bytes, a head lies in one piece.
struct States {
    const char* from;
    char* pool;
    int64_t heads, bytes, token, head;
};

// Where a step's tokens go: one for all layers of a group, written anew for each step.
struct Slots {
    const int64_t* slots;
    int64_t tokens;
};

struct Call {
    const Slots* step;
    int64_t places;
    States states[2];
};

}  // namespace

extern "C" bool store(const Call* call) {
    const auto [slots, tokens] = *call->step;
    for (int64_t i = 0; i < tokens; i++)
        if (slots[i] < 0 || slots[i] >= call->places) return false;
    for (const States& s : call->states)
        for (int64_t i = 0; i < tokens; i++) {
            char* to = s.pool + slots[i] * s.heads * s.bytes;
            const char* from = s.from + i * s.token;
            if (s.head == s.bytes) std::memcpy(to, from, s.heads * s.bytes);
            else
                for (int64_t h = 0; h < s.heads; h++)
                    std::memcpy(to + h * s.bytes, from + h * s.head, s.bytes);
        }
    return true;
}
