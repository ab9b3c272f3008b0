#include "thread_pool.h"

#include <chrono>
#include <map>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace outpace {
namespace {

// A pause is some 40 to 140 cycles on x86: waits at barriers are short, waits for the next step as long as the host takes.
constexpr int kBarrierSpins = 2000;
constexpr int kStartSpins = 1000;
constexpr int kYields = 32;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void Signal::raise() {
    // Sequentially consistent on both sides: either we see the sleeper, or it sees the new value before it sleeps.
    value_.fetch_add(1);
    if (sleepers_.load() > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        changed_.notify_all();
    }
}

void Signal::wait_while(uint32_t old, int spins) {
    for (int i = 0; i < spins; i++) {
        if (value() != old) return;
        pause();
    }
    // Where threads outnumber free cores, the one we wait for may need this core.
    for (int i = 0; i < kYields; i++) {
        if (value() != old) return;
        std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    changed_.wait(lock, [&] { return value_.load() != old; });
    sleepers_.fetch_sub(1);
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
    workers_.reserve(size_t(num_threads_ - 1));
    try {
        for (int i = 1; i < num_threads_; i++) workers_.emplace_back([this, i] { work(i); });
    } catch (...) {
        stopping_.store(true);
        start_.raise();
        for (auto& worker : workers_) worker.join();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    stopping_.store(true);
    start_.raise();
    for (auto& worker : workers_) worker.join();
}

std::shared_ptr<ThreadPool> ThreadPool::shared(int num_threads) {
    static std::mutex mutex;
    static std::map<int, std::weak_ptr<ThreadPool>> pools;
    std::lock_guard<std::mutex> lock(mutex);
    auto pool = pools[num_threads].lock();
    if (!pool) pools[num_threads] = pool = std::make_shared<ThreadPool>(num_threads);
    return pool;
}

void ThreadPool::give(Call call, void* argument, uint32_t tag, bool is_together) {
    {
        std::lock_guard<std::mutex> lock(job_mutex_);
        job_ = Job{call, argument, tag, is_together, job_.number + 1};
    }
    start_.raise();
}

void ThreadPool::work(int thread) {
    uint32_t signal = 0, latest = 0;
    for (;;) {
        start_.wait_while(signal, kStartSpins);
        signal = start_.value();
        if (stopping_.load()) return;
        Job job;
        {
            std::lock_guard<std::mutex> lock(job_mutex_);
            if (job_.number == latest) continue;  // taken already, before its signal was raised
            job = job_;
            num_inside_.fetch_add(1);
        }
        latest = job.number;
        if (job.call) job.call(job.argument, thread, job.tag);
        if (job.is_together) barrier();
        num_inside_.fetch_sub(1);
    }
}

void ThreadPool::leave(const void* work) {
    std::lock_guard<std::mutex> turn(turn_);
    {
        std::lock_guard<std::mutex> lock(job_mutex_);
        if (job_.argument == work) job_.call = nullptr;
    }
    while (num_inside_.load() > 0) std::this_thread::yield();
}

void ThreadPool::barrier() {
    if (num_threads_ == 1) return;
    const uint32_t round = passed_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        passed_.raise();
    } else {
        passed_.wait_while(round, kBarrierSpins);
    }
}

// Both words: 32 bits of tag, 16 of pieces, 16 of count.
void Phase::begin(uint32_t tag, int num_pieces) {
    const uint64_t word = uint64_t(tag) << 32 | uint64_t(num_pieces) << 16;
    done_.store(word | (num_pieces ? 0 : 1), std::memory_order_relaxed);
    taken_.store(word, std::memory_order_release);
}

int Phase::take(uint32_t tag) {
    uint64_t word = taken_.load(std::memory_order_acquire);
    while (uint32_t(word >> 32) == tag && (word & 0xffff) < (word >> 16 & 0xffff)) {
        if (taken_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) return int(word & 0xffff);
    }
    return -1;
}

bool Phase::finish() {
    const uint64_t word = done_.fetch_add(1, std::memory_order_acq_rel) + 1;
    return (word & 0xffff) == (word >> 16 & 0xffff);
}

bool Phase::wait(uint32_t tag) const {
    for (int i = 0;; i++) {
        const uint64_t word = done_.load(std::memory_order_acquire);
        if (uint32_t(word >> 32) != tag) return false;
        if ((word & 0xffff) > (word >> 16 & 0xffff)) return true;
        if (i < kBarrierSpins) {
            pause();
        } else if (i < kBarrierSpins + kYields) {
            std::this_thread::yield();  // the one we wait for may need this core
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }
}

}  // namespace outpace
