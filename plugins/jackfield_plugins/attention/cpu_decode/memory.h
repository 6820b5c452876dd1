// Memory that a thread keeps from call to call.
#pragma once
#include <cstdlib>

struct Memory {
    char* at = nullptr;
    size_t size = 0;
    ~Memory() { std::free(at); }
    char* hold(size_t bytes) {
        if (bytes > size) {
            std::free(at);
            size = (bytes + 4095) / 4096 * 4096;
            at = static_cast<char*>(std::aligned_alloc(64, size));
        }
        return at;
    }
};
