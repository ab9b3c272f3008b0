"""Chooses which requests take part in the next step, and with how many tokens each.

Running requests are served in the order of admission: decodes first, one token each, then prompt chunks with the rest
of the token budget, then admissions. When the cache is full, kept prefixes of finished requests are evicted, least
recently used first. Then the youngest running request is preempted: it returns to the queue with its tokens, before
all of its priority, and is computed again later. A request never waits for a younger one of its priority, and a single
request always fits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from outpace.core import Request
from outpace.kv.cache import SequenceCache
from outpace.kv.prefix import common_prefix_length

# Sharing fewer tokens than this is not worth waiting for the request that is computing them.
MIN_SHARED_TOKENS = 16


@dataclass(slots=True)
class Work:
    """The next num_tokens pending tokens of a request; `completes` if these are all, so a token can be emitted."""

    request: Request
    num_tokens: int
    completes: bool
    is_decoding: bool  # its only pending token is one that it emitted
    num_scored: int = 0  # of these tokens, how many score the next prompt token, or add their state to an embedding

    @property
    def emits(self) -> bool:
        return self.completes and self.request.has_output


@dataclass(slots=True)
class _Kept:
    """What a finished request left in the cache, for requests with the same salt."""

    tokens: list[int]
    salt: str


class Scheduler:
    def __init__(
        self,
        cache: SequenceCache,
        *,
        max_running: int,
        max_step_tokens: int,
        prefix_reuse: bool,
        max_scored_tokens: int = 1,
    ) -> None:
        """`max_scored_tokens`: prompt tokens that are scored in one step; each needs a row of logits."""
        self._cache = cache
        self._max_scored_tokens = max_scored_tokens
        self._num_logits = 0  # for scoring, in the step that is being scheduled
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._prefix_reuse = prefix_reuse
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # sequences of finished requests
        self._preempted: list[Request] = []

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request after those of the same or a lower number of priority."""
        if not self.waiting or self.waiting[-1].priority <= request.priority:
            self.waiting.append(request)
        else:
            self._insert(request, before=lambda other: other.priority > request.priority)

    def _insert(self, request: Request, before: Callable[[Request], bool]) -> None:
        place = next((i for i, other in enumerate(self.waiting) if before(other)), len(self.waiting))
        self.waiting.insert(place, request)

    def remove(self, request: Request, *, keep_prefix: bool) -> None:
        """Remove a request that has ended. With `keep_prefix`, others may share its cache until the room is needed."""
        if request not in self.running:
            if request in self.waiting:
                self.waiting.remove(request)
            return
        self.running.remove(request)
        assert request.seq is not None
        if keep_prefix and self._prefix_reuse and request.num_computed >= MIN_SHARED_TOKENS:
            self._kept[request.seq] = _Kept(request.tokens[: request.num_computed], request.cache_salt)
        else:
            self._cache.close(request.seq)
        request.seq = None

    def schedule(self) -> list[Work]:
        """Choose this step's work and reserve cache for it."""
        work: list[Work] = []
        budget = self._max_step_tokens
        self._num_logits = 0
        prefilling: list[Request] = []
        decoding: list[Request] = []
        for request in self.running:
            (decoding if request.is_decoding else prefilling).append(request)
        for group, is_decoding in ((decoding, True), (prefilling, False)):
            for request in group:
                if request.seq is None:
                    continue  # preempted earlier in this loop
                item = self._continue(request, budget, is_decoding)
                if item is not None:
                    work.append(item)
                    budget -= item.num_tokens
        if self._preempted:  # decodes of younger requests come before the prompt chunk that needed their room
            work = [item for item in work if item.request.seq is not None]
        for request in list(self.waiting):
            if budget == 0 or len(self.running) >= self._max_running or not self._admit(request):
                break
            if request.seq is None:
                continue  # waits until an older request has computed their common prefix
            item = self._continue(request, budget, request.is_decoding)
            if item is not None:
                work.append(item)
                budget -= item.num_tokens
        return work

    def take_preempted(self) -> list[Request]:
        """Requests preempted since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def reserve_draft(self, request: Request, depth: int) -> int:
        """Reserve cache for up to `depth` draft tokens, without preempting a request; returns how many fit."""
        assert request.seq is not None
        while depth > 0 and not self._cache.reserve(request.seq, request.num_pending + depth):
            if not self._evict_kept():
                depth -= 1
        return depth

    def forget_kept(self) -> None:
        """Drop every kept prefix."""
        while self._evict_kept():
            pass

    def _continue(self, request: Request, budget: int, is_decoding: bool) -> Work | None:
        """The next chunk of a running request; None if no budget is left for it or it was preempted."""
        num_pending = request.num_pending
        num_tokens = num_pending if num_pending < budget else budget
        num_unscored = 0 if is_decoding else request.num_unscored
        if num_unscored:
            num_tokens = min(num_tokens, self._num_before_scoring(request) + self._max_scored_tokens - self._num_logits)
        if num_tokens == 0:
            return None
        assert request.seq is not None
        if not self._cache.reserve(request.seq, num_tokens):
            while self._cache.num_free_tokens < num_tokens and self._evict_kept():
                pass
            while self._cache.num_free_tokens == 0:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    return None
            num_tokens = min(num_tokens, self._cache.num_free_tokens)
            reserved = self._cache.reserve(request.seq, num_tokens)
            assert reserved
        num_scored = 0
        if num_unscored:
            num_lines = max(0, num_tokens - self._num_before_scoring(request))  # of logits
            num_scored = min(num_lines, num_unscored)
            self._num_logits += num_lines
        return Work(request, num_tokens, num_tokens == num_pending, is_decoding, num_scored)

    def _num_before_scoring(self, request: Request) -> int:
        """Pending tokens of a preempted request that need no logits: what follows them was scored before."""
        return max(0, request.num_scored - request.num_computed)

    def _preempt(self, request: Request) -> None:
        assert request.seq is not None
        self._cache.close(request.seq)
        request.seq, request.num_computed = None, 0
        request.num_preemptions += 1
        self.running.remove(request)
        self._insert(request, before=lambda other: other.priority >= request.priority)
        self._preempted.append(request)

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a sequence if all it has to compute fits. False: no request behind it may be admitted.

        True with `request.seq` still None: it waits for a shared prefix, and others may be admitted before it.
        """
        donor, num_shared = None, 0
        if self._prefix_reuse:
            donor, num_shared, worth_waiting = self._find_donor(request)
            if worth_waiting:
                return True
        needed = min(len(request.tokens) + 1, request.max_length) - num_shared
        while self._cache.num_free_tokens < needed or self._cache.num_unused_sequences == 0:
            if not (self._evict_kept(spare=donor) or self._trim_kept(donor, num_shared)):
                return False
        if donor is not None:
            request.seq = self._cache.fork(donor, num_shared)
            if donor in self._kept:
                self._kept.move_to_end(donor)
        else:
            request.seq = self._cache.open()
        request.num_computed = request.num_shared = num_shared
        if request.admitted_at is None:
            request.admitted_at = perf_counter()
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _find_donor(self, request: Request) -> tuple[int | None, int, bool]:
        """The sequence that shares most with the request, how many tokens now, and whether to wait for more."""
        most = request.num_shareable  # 0 for a prompt that is to be scored: a cache has no logits
        best: int | None = None
        best_shared = MIN_SHARED_TOKENS - 1
        still_to_come = 0
        for seq, kept in self._kept.items():
            if kept.salt != request.cache_salt:
                continue
            shared = min(common_prefix_length(kept.tokens, request.tokens), most)
            if shared > best_shared:
                best, best_shared = seq, shared
        for other in self.running:
            assert other.seq is not None
            if other.cache_salt != request.cache_salt:
                continue
            common = min(common_prefix_length(other.tokens, request.tokens), most)
            shared = min(common, other.num_computed)
            still_to_come = max(still_to_come, common)
            if shared > best_shared:
                best, best_shared = other.seq, shared
        now = best_shared if best is not None else 0
        return best, now, still_to_come - now >= MIN_SHARED_TOKENS

    def _evict_kept(self, spare: int | None = None) -> bool:
        """Evict the least recently used kept prefix other than `spare`; False if there is none."""
        for seq in self._kept:
            if seq != spare:
                del self._kept[seq]
                self._cache.close(seq)
                return True
        return False

    def _trim_kept(self, seq: int | None, num_tokens: int) -> bool:
        """Cut a kept prefix to its first `num_tokens`; False if it has no more than that.

        Without this, the prefix could block the request that shares it, forever if nothing else runs.
        """
        if seq is None or seq not in self._kept or len(self._kept[seq].tokens) <= num_tokens:
            return False
        del self._kept[seq].tokens[num_tokens:]
        self._cache.rewind(seq, num_tokens)
        return True

    def check_integrity(self) -> None:
        self._cache.check_integrity()
        owners = [request.seq for request in self.running] + list(self._kept)
        assert None not in owners, "a running request has no sequence"
        assert len(set(owners)) == len(owners) == self._cache.num_open_sequences, "a sequence has no owner, or two"
        for request in self.running:
            assert request.seq is not None
            assert self._cache.length(request.seq) == request.num_computed, f"request {request.id}: wrong length"
        for seq, kept in self._kept.items():
            assert self._cache.length(seq) == len(kept.tokens), "a kept prefix has the wrong length"
        for request in self.waiting:
            assert request.seq is None and request.num_computed == 0, f"request {request.id} waits and holds cache"
