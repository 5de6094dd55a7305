#pragma once

// Not part of llama.cpp: bounds on what a template may use while it is compiled
// and rendered. They hold for the thread that has a limit_scope; without one
// nothing is counted.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace jinja {

struct value_t;

struct limits {
    int64_t steps = 5000000;  // evaluated nodes, compared and copied elements
    int64_t depth = 400;      // nesting of nodes, values and calls
    size_t  bytes = 256u << 20; // live values, and all text made so far
    std::chrono::milliseconds time{10000};
};

struct limit_exceeded : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

class limit_scope {
public:
    explicit limit_scope(const limits & limits);
    ~limit_scope();
    limit_scope(const limit_scope &) = delete;
    limit_scope & operator=(const limit_scope &) = delete;
};

// all of these throw limit_exceeded; once one has, the next ones do as well
void charge_steps(int64_t steps = 1);
void charge_bytes(size_t bytes);
// for a naive search: `needle` bytes compared at up to `haystack` places
void charge_search(size_t haystack, size_t needle);
// one more value alive, one less
void charge_value();
void release_value() noexcept;

// memory that is given back at the end of a block
class scoped_bytes {
public:
    explicit scoped_bytes(size_t bytes);
    ~scoped_bytes();
    scoped_bytes(const scoped_bytes &) = delete;
    scoped_bytes & operator=(const scoped_bytes &) = delete;
private:
    size_t bytes;
};

class depth_guard {
public:
    depth_guard();
    ~depth_guard();
    depth_guard(const depth_guard &) = delete;
    depth_guard & operator=(const depth_guard &) = delete;
};

int64_t depth_limit();

// a container that got another container after it was made, and so may be part
// of a cycle: it is emptied at the end of the scope
void note_mutated(const std::shared_ptr<value_t> & val);

// destroys `children` without recursion
void destroy_values(std::vector<std::shared_ptr<value_t>> && children) noexcept;

} // namespace jinja
