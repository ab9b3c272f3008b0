// Persistent workers.
//
// There are two kinds of jobs. run(): every thread runs a region once, with barriers; used for loading. post(): threads
// share the work dynamically (see relay.h). The caller works too and continues as soon as all work is done, even if
// other threads never started: on a shared machine, a descheduled thread then delays no other. Waiting spins briefly,
// then sleeps, so that an idle server uses no CPU. Which thread computes what is not deterministic, so no result may
// depend on it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace outpace {

// A number that threads can wait on until it changes; they spin first, then sleep.
class Signal {
  public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }
    void raise();
    void wait_while(uint32_t old, int spins);

  private:
    std::atomic<uint32_t> value_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
};

class ThreadPool {
  public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // One pool per size for the whole process: a target and its draft alternate, and the spinning workers of a second,
    // idle pool would slow the busy one.
    static std::shared_ptr<ThreadPool> shared(int num_threads);

    int size() const { return num_threads_; }

    // Call region(thread) on every thread of the pool, the caller being thread 0; returns when all are done. Callers on
    // different threads take turns.
    template <typename Region>
    void run(Region&& region) {
        std::lock_guard<std::mutex> lock(turn_);
        give([](void* it, int thread, uint64_t) { (*static_cast<std::remove_reference_t<Region>*>(it))(thread); }, &region, 0, true);
        region(0);
        barrier();
    }

    // Inside a region: wait until every thread has reached this point.
    void barrier();

    // Calls work(thread, tag) on the caller, as thread 0, and at some time, or never, on the others. `work` must return
    // when its tag is over, and must live until leave().
    template <typename Work>
    void post(Work& work, uint64_t tag) {
        std::lock_guard<std::mutex> lock(turn_);
        if (num_threads_ > 1) {
            give([](void* it, int thread, uint64_t now) { (*static_cast<Work*>(it))(thread, now); }, &work, tag, false);
        }
        work(0, tag);
    }

    // After this returns, no thread runs the posted work or will run it.
    void leave(const void* work);

  private:
    using Call = void (*)(void*, int thread, uint64_t tag);
    struct Job {
        Call call = nullptr;
        void* argument = nullptr;
        uint64_t tag = 0;
        bool is_together = false;
        uint32_t number = 0;
    };
    void give(Call call, void* argument, uint64_t tag, bool is_together);
    void work(int thread);

    const int num_threads_;
    std::vector<std::thread> workers_;
    std::mutex turn_;
    std::mutex job_mutex_;
    Job job_;
    std::atomic<int> num_inside_{0};
    std::atomic<bool> stopping_{false};
    Signal start_;
    alignas(64) std::atomic<int> arrived_{0};
    Signal passed_;
};

}  // namespace outpace
