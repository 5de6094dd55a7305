// kvcache/cache.h - the contract between a forward and its memory.
//
// Whoever owns the loop opens a Step, passes it to the forward, commits it. The
// forward sees only the Step and never learns which cache is behind it.
// B rows and T tokens of the step, H key/value heads, D head size, C conv
// channels, Kc = conv kernel - 1. docs/cache-contract.md has the verbs x kinds.
#pragma once

#include "kvcache/types.h"  // Tensor, CacheSpec, StepSpec, KvView, Checkpoint

namespace kvcache {

class Cache;
struct StepData;    // what a kind sees of an open step:
struct CellLayout;  // kvcache/detail/step_data.h

// An open step, abandoned if destroyed before commit(). Must not outlive its
// cache. References and views are good until it is committed or destroyed.
class [[nodiscard]] Step {
 public:
  Step(Step&& other) noexcept;
  Step& operator=(Step&& other) noexcept;
  ~Step();

  int64_t rows() const;             // B of this step
  int64_t tokens() const;           // T, padding included
  const Tensor& positions() const;  // [B, T] int64; 0 where dead
  const Tensor& limits() const;     // [B, T] int64; position + 1, dead: 0
  bool live(int64_t row, int64_t token) const;

  // Stores `k`, `v` [B, H, T, D] of the new tokens; returns what to attend to.
  const KvView& update(int64_t layer, const Tensor& k, const Tensor& v);
  // update() without the copy: the caller writes `cells` in the view's format.
  const KvView& reserve(int64_t layer);
  const StateView& state(int64_t layer);
  // `x` [B, C, T] behind the saved inputs: [B, C, Kc + T]; column Kc + t is
  // token t, the inputs before the first live token stand right before it, dead
  // columns are 0. Writes the layer's next_conv.
  Tensor extend_conv(int64_t layer, const Tensor& x);
  // Null unless StepSpec::state_window. Who asks promises to fill it with the
  // live tokens' states; extend_conv() fills `conv` itself. A window counts if
  // every layer's was asked for, or was filled by extend_conv() alone.
  const StateWindow* state_window(int64_t layer);
  void commit();  // throws if a layer was left out; the step is then still open

 private:
  friend class Cache;
  friend class StepGraph;
  explicit Step(Cache& cache) noexcept : cache_(&cache) {}
  StepData& data() const;
  void check_complete() const;  // throws if a layer was left out
  Cache* cache_;  // nullptr once closed; the data lives in the cache, reused
};

// Memory of B rows. Not thread-safe; distinct caches are independent.
//
// Errors: c10::Error, and nothing has changed. Between-step calls throw while a
// step is open. A step that does not commit leaves all tokens as they were.
class Cache {
 public:
  virtual ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  const CacheSpec& spec() const noexcept;
  // [rows], live tokens. Throws where only the device knows them: inside of a
  // recorded step, and until the tokens of a replay that may end rows are read.
  std::span<const int64_t> lengths() const;
  int64_t capacity() const noexcept;  // most tokens a row holds; unbounded: max
  // Changes if and only if an address that a recorded graph may hold has.
  uint64_t address_epoch() const noexcept;
  virtual std::string describe() const = 0;  // one line for people

  Step begin_step(const StepSpec& step = {});  // throws if `count` does not fit
  bool fits(int64_t tokens) const;  // would a step of so many fit in every row

  // Keeps at most lengths[b] tokens of row b; a longer target is no change.
  // lengths() says what was kept, the result how many to feed again, and why.
  // Exact inside of a state window: until a step with tokens for the row, any
  // step that asks for a window, or the row's reset or restore.
  Truncation truncate(std::span<const int64_t> lengths);
  Truncation truncate(int64_t length);
  Truncation drop_last(int64_t tokens);  // of every row; at most all of it
  void mark();  // a restore point in every row, if there are states
  void mark(int64_t row);
  void unmark(int64_t row, int64_t position);  // if there is a point
  // Positions that truncate() and restore() can go back to, ascending, beside
  // 0; without states it is any.
  std::vector<int64_t> restore_points(int64_t row) const;
  void reset();  // no tokens; in-place kinds keep memory and addresses
  void reset(int64_t row);
  // Row i becomes what rows[i] was. Another row count: new memory, new epoch.
  void reorder(std::span<const int64_t> rows);
  void repeat_rows(int64_t times);  // 0 0 1 1 ..., for `times` beams a row
  std::unique_ptr<Cache> fork() const;

  // One row: K/V of [0, length), its restore points, and one at the length.
  Checkpoint checkpoint(int64_t row) const;
  // The same with K/V in blocks, so that checkpoints of texts that begin alike
  // share memory. Not of a row whose ring has overwritten keys.
  Checkpoint checkpoint(int64_t row, const BlockOptions& options) const;
  Truncation restore(const Checkpoint& from, int64_t row,
                     std::optional<int64_t> length = {});
  // Plain copies of one attention layer, [B, H, longest, D], 0 past a length.
  KvTensors export_kv(int64_t layer) const;
  // Replaces all rows; one pair per layer [B, H, >= lengths, D]. No recurrent
  // layers: their state is not in K/V, so use restore() for those.
  void import_kv(std::span<const KvTensors> layers,
                 std::span<const int64_t> lengths);

  MemoryReport memory() const;
  std::vector<std::string> validate() const;  // broken invariants; empty: sound

 protected:
  // For kinds: K/V storage only. Arguments are checked; Cache does lengths, the
  // order of calls and states. Those with `= 0` are what every kind needs, the
  // others are for kinds with static windows, rings or recorded steps.
  enum class States : uint8_t { kCopy, kSwap };  // kSwap: addresses may move
  Cache(CacheSpec spec, States states);
  void raise_epoch() noexcept;
  void check_idle(const char* verb) const;  // throws while a step is open
  // Live tokens that a step may have in a row; bounded by rings only.
  int64_t most_live() const noexcept;
  // A restore point at a row's length, of which at most `most` are kept: those
  // whose distances grow with the distance from the end. Without memory for it
  // nothing changes.
  void mark_and_thin(int64_t row, size_t most) noexcept;
  // Of every attention layer; without a call all positions are their own cells.
  void place_cells(const std::vector<CellLayout>& layouts);

  // Why a step cannot be replayed; null: it can, its shapes and addresses are
  // those of its window.
  virtual const char* do_cannot_record() const noexcept;

  // `index` counts attention layers only, from 0.
  virtual int64_t do_window(int64_t longest) const;  // a bucket
  // slots: `count` where the spec has none
  virtual void do_default_count(const StepSpec& spec,
                                std::vector<int64_t>& count) const;
  virtual void do_begin_host(StepData& step);  // room for it
  // Rows, tokens or addresses are others than before: k and v of every view.
  virtual void do_shape(StepData& step);
  virtual void do_reserve(StepData& step, int64_t index);  // concat: grows
  virtual void do_write(const StepData& step, int64_t index, const Tensor& k,
                        const Tensor& v);            // into step.views[index]
  virtual void do_commit(StepData& step) noexcept;   // concat: swaps
  virtual void do_abandon(StepData& step) noexcept;  // concat: drops
  virtual void do_committed(const StepData& step) noexcept;  // lengths are new
  virtual void do_shrunk();  // lengths() went down: reset, truncate
  // A row was cut inside of its state window, which begins behind `before`
  // tokens: as if a step had ended here.
  virtual void do_cut_in_window(int64_t row, int64_t before) noexcept;
  // K and V of a row with tokens: [H, S, D], positions in their cells.
  virtual KvTensors do_row(int64_t row, int64_t index) const = 0;
  virtual void do_import(int64_t row, const Checkpoint& from, int64_t n) = 0;
  virtual void do_reorder(std::span<const int64_t> rows) = 0;
  virtual std::unique_ptr<Cache> do_make() const = 0;  // empty, same spec
  virtual void do_memory(MemoryReport& report) const = 0;
  virtual void do_validate(std::vector<std::string>& broken) const;

 private:
  friend class Step;
  friend class StepGraph;  // runs the halves of a step
  KvTensors take_layer(int64_t row, size_t index, int64_t first) const;
  void export_row(int64_t row, Checkpoint& to) const;
  void add_blocks(int64_t row, const BlockOptions& options,
                  Checkpoint& to) const;
  // The halves of `repeats` steps of one spec. Only the host's may throw for
  // what the caller did; only the device's are recorded.
  void begin_host(const StepSpec& spec, int64_t repeats,
                  std::optional<int64_t> window);
  void begin_device();
  void shape_step();
  void commit_device();
  void commit_host(int64_t repeats) noexcept;
  struct Impl;  // lengths, states, restore points, the open step
  std::unique_ptr<Impl> impl_;
};

// Bytes that `tokens` tokens in each of spec.rows rows need, states included;
// what an in-place kind of that capacity allocates.
size_t bytes_needed(const CacheSpec& spec, int64_t tokens);

}  // namespace kvcache
