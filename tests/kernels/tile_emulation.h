// AMX instructions in plain C++, as Intel's manual describes them, for processors that have none.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulated {

struct Registers {
    float words[8][16][16];
    bool are_set_up = false;
};

inline Registers& any_registers() {
    static thread_local Registers* the_registers = nullptr;
    if (the_registers == nullptr) the_registers = new Registers;
    return *the_registers;
}

inline Registers& in_use() {
    Registers& mine = any_registers();
    if (!mine.are_set_up) __builtin_trap();  // As the processor would.
    return mine;
}

inline float widened(uint16_t bits) {
    uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

}  // namespace emulated

inline void _tile_loadconfig(const void*) { emulated::any_registers().are_set_up = true; }

inline void _tile_release() { emulated::any_registers().are_set_up = false; }

inline void _tile_zero(int tile) { std::memset(emulated::in_use().words[tile], 0, 1024); }

inline void _tile_loadd(int tile, const void* from, int64_t stride) {
    for (int row = 0; row < 16; ++row) {
        std::memcpy(emulated::in_use().words[tile][row], static_cast<const char*>(from) + row * stride, 64);
    }
}

inline void _tile_stored(int tile, void* to, int64_t stride) {
    for (int row = 0; row < 16; ++row) {
        std::memcpy(static_cast<char*>(to) + row * stride, emulated::in_use().words[tile][row], 64);
    }
}

inline void _tile_dpbf16ps(int sum, int left, int right) {
    auto& words = emulated::in_use().words;
    for (int row = 0; row < 16; ++row) {
        float even[16] = {}, odd[16] = {};
        for (int pair = 0; pair < 16; ++pair) {
            uint16_t factors[2];
            std::memcpy(factors, &words[left][row][pair], 4);
            for (int column = 0; column < 16; ++column) {
                uint16_t others[2];
                std::memcpy(others, &words[right][pair][column], 4);
                even[column] += emulated::widened(factors[0]) * emulated::widened(others[0]);
                odd[column] += emulated::widened(factors[1]) * emulated::widened(others[1]);
            }
        }
        for (int column = 0; column < 16; ++column) words[sum][row][column] += even[column] + odd[column];
    }
}
