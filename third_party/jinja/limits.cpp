#include "limits.h"
#include "value.h"

#include <utility>

namespace jinja {

namespace {

constexpr size_t value_bytes = 256;
constexpr int64_t steps_between_clock_reads = 8;

struct usage {
    limits most;
    std::chrono::steady_clock::time_point deadline;
    int64_t steps = 0;
    int64_t depth = 0;
    size_t  bytes = 0;
    size_t  values = 0;
    int64_t next_clock_read = 0;
    std::string exceeded; // the message, once a limit was passed
    std::vector<std::shared_ptr<value_t>> mutated;
    usage * outer = nullptr;
};

thread_local usage * current = nullptr;

[[noreturn]] void exceed(const std::string & what) {
    if (current->exceeded.empty()) {
        current->exceeded = what;
    }
    throw limit_exceeded(current->exceeded);
}

} // namespace

limit_scope::limit_scope(const limits & limits) {
    auto * scope = new usage;
    scope->most = limits;
    scope->deadline = std::chrono::steady_clock::now() + limits.time;
    scope->outer = current;
    current = scope;
}

limit_scope::~limit_scope() {
    usage * scope = current;
    // break cycles: every container in `mutated` lives until all are empty
    for (auto & val : scope->mutated) {
        std::vector<value> items;
        std::vector<std::pair<value, value>> pairs;
        items.swap(val->val_arr);
        pairs.swap(val->val_obj);
        if (auto * obj = dynamic_cast<value_object_t *>(val.get())) {
            obj->unordered.clear();
        }
    }
    scope->mutated.clear();
    current = scope->outer;
    delete scope;
}

void charge_steps(int64_t steps) {
    if (!current) {
        return;
    }
    current->steps += steps;
    if (!current->exceeded.empty()) {
        exceed("");
    }
    if (current->steps > current->most.steps) {
        exceed("more than " + std::to_string(current->most.steps) + " steps");
    }
    if (current->steps >= current->next_clock_read) {
        current->next_clock_read = current->steps + steps_between_clock_reads;
        if (std::chrono::steady_clock::now() > current->deadline) {
            exceed("more than " + std::to_string(current->most.time.count()) + " ms");
        }
    }
}

static void check_bytes(size_t more) {
    const size_t used = current->bytes + current->values * value_bytes;
    if (!current->exceeded.empty() || more > current->most.bytes || used > current->most.bytes - more) {
        exceed("more than " + std::to_string(current->most.bytes) + " bytes of memory");
    }
}

void charge_bytes(size_t bytes) {
    if (!current) {
        return;
    }
    check_bytes(bytes);
    current->bytes += bytes;
}

void charge_search(size_t haystack, size_t needle) {
    if (!current) {
        return;
    }
    // a step for every 4 KiB compared at worst
    const double steps = static_cast<double>(haystack) * static_cast<double>(needle) / 4096.0;
    if (steps > 1e15) {
        exceed("more than " + std::to_string(current->most.steps) + " steps");
    }
    charge_steps(1 + static_cast<int64_t>(steps));
}

void charge_value() {
    if (!current) {
        return;
    }
    check_bytes(value_bytes);
    current->values++;
}

void release_value() noexcept {
    if (current && current->values > 0) {
        current->values--;
    }
}

scoped_bytes::scoped_bytes(size_t bytes) : bytes(bytes) {
    charge_bytes(bytes);
}

scoped_bytes::~scoped_bytes() {
    if (current && current->bytes >= bytes) {
        current->bytes -= bytes;
    }
}

depth_guard::depth_guard() {
    if (!current) {
        return;
    }
    if (current->depth >= current->most.depth) {
        exceed("nested more than " + std::to_string(current->most.depth) + " deep");
    }
    current->depth++;
}

depth_guard::~depth_guard() {
    if (current && current->depth > 0) {
        current->depth--;
    }
}

int64_t depth_limit() {
    return current ? current->most.depth : INT64_MAX;
}

void note_mutated(const std::shared_ptr<value_t> & val) {
    if (current && (current->mutated.empty() || current->mutated.back() != val)) {
        charge_bytes(sizeof(val));
        current->mutated.push_back(val);
    }
}

void destroy_values(std::vector<std::shared_ptr<value_t>> && children) noexcept {
    // values whose last reference is being dropped; only the outermost call drains it
    thread_local std::vector<std::shared_ptr<value_t>> * pending = nullptr;
    if (pending) {
        for (auto & child : children) {
            pending->push_back(std::move(child));
        }
        return;
    }
    std::vector<std::shared_ptr<value_t>> queue = std::move(children);
    pending = &queue;
    while (!queue.empty()) {
        std::shared_ptr<value_t> next = std::move(queue.back());
        queue.pop_back();
        next.reset(); // may add its own children to the queue
    }
    pending = nullptr;
}

} // namespace jinja
