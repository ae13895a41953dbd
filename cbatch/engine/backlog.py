"""Looking ahead: how many requests to take before they are needed, and in which order to run them."""

from __future__ import annotations

import math

from cbatch.engine.protocol import Requests
from cbatch.rows.request import Request

_WINDOW = 4  # times `max_num_seqs`: how many requests may wait


class Backlog:
    """Takes requests from their source in windows, and puts each window into a good order.

    In the order `auto`, requests that may get longest go first, so that no long one is left alone at the end. Requests
    of about the same length that begin alike go side by side, so that the prefix cache still has their beginning. In
    the order `input` they stay as they come.
    """

    def __init__(self, max_num_seqs: int, longest_row: int, order: str) -> None:
        """`max_num_seqs`: sequences that can run at once. `longest_row`: tokens of prompt and completion that fit."""
        self._max_num_seqs, self._longest_row, self._order = max_num_seqs, longest_row, order

    def take(self, requests: Requests, num_waiting: int, is_idle: bool) -> list[Request]:
        """The next window of requests, if fewer are waiting than one step could admit; else nothing.

        `is_idle`: there is nothing else to do, so the first request has a moment to come.
        """
        taken: list[Request] = []
        if requests.ended or num_waiting >= self._max_num_seqs:
            return taken
        while num_waiting + len(taken) < _WINDOW * self._max_num_seqs:
            request = requests.take(wait=is_idle and not taken)
            if request is None:
                break
            taken.append(request)
        if self._order == "auto":
            taken.sort(key=self._longest_first)
        return taken

    def _longest_first(self, request: Request) -> tuple[int, list[int]]:
        """Sort key: tokens that may be generated, rounded to half a power of two, most first; then the prompt."""
        most = min(request.params.max_tokens, self._longest_row - len(request.token_ids))
        return -round(2 * math.log2(max(1, most))), request.token_ids
