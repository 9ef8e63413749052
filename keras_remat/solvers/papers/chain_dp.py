"""Solves chains of unequal stages by an exact dynamic program.

For each stage it saves the stage's input, all values that the stage computes, or nothing.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, *Optimal checkpointing for heterogeneous
chains: how to train deep neural networks with limited memory*, arXiv 1911.13214 ("rotor"), theorem
1. C(s, t, m) is the least time to run stages s to t forward and backward when the input of s is
kept and m bytes are free beside it. The first forward run of stage s saves everything (the equation
of C2), or only its input, up to the next stage s' whose input is kept (C1). That is optimal among
schedules in which a kept value stays until its backward stage ("persistent").

On a graph that is no chain the forward phase is cut at its articulation points into blocks, and
each block is a stage. Its output are the values that cross the cut after it. Its backward stage is
every later op up to the first that reads a block before it. Bytes are counted in ``UNITS`` units,
rounded upwards. The plans for many amounts of memory come from one table. Recomputations are taken
back where there is room (:mod:`keras_remat.solvers.orders.trim`; the program drops a block's input
even where the block before could use it), and the fastest plan that really fits, by simulation, is
returned. So the details that the model leaves out (values beside the chain, buffer reuse) may cost
optimality, but never break the budget. Other graphs are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keras_remat.solvers.orders.demand import Walk, order_of
from keras_remat.solvers.orders.incumbent import Incumbent
from keras_remat.solvers.orders.linearize import Linearized
from keras_remat.solvers.orders.trim import trimmed

UNITS = 400
MAX_STAGES = 120
MAX_PLANS = 60
SPARE = 1.25
"""The table reaches this far over the budget, because rounding up and buffer reuse leave room."""


@dataclass(frozen=True)
class Stages:
    """Holds the forward phase cut into blocks, with the dynamic program's numbers of each.

    Args:
        linear: the problem's forward phase.
        cuts: ascending forward positions; block ``s`` ends at ``cuts[s]``, the last block with the
            forward phase.
    """

    linear: Linearized
    cuts: tuple[int, ...]

    @cached_property
    def forward(self) -> list[list[int]]:
        """Returns the forward ops of each block."""
        ends = [*self.cuts, len(self.linear.forward) - 1]
        starts = [0, *(cut + 1 for cut in self.cuts)]
        return [list(self.linear.forward[a : b + 1]) for a, b in zip(starts, ends, strict=True)]

    @cached_property
    def block_of(self) -> dict[int, int]:
        """Returns value computed in the forward phase → block."""
        graph = self.linear.problem.graph
        return {
            v: s for s, ops in enumerate(self.forward) for i in ops for v in graph.ops[i].outputs
        }

    @cached_property
    def backward(self) -> list[list[int]]:
        """Returns the other ops of each block, in default order, from the last block on."""
        graph = self.linear.problem.graph
        blocks: list[list[int]] = [[] for _ in self.forward]
        current = len(self.forward) - 1
        for op_id in self.linear.default_order:
            if op_id not in self.linear.position:
                read = [self.block_of[v] for v in graph.ops[op_id].inputs if v in self.block_of]
                current = min(current, max(read, default=current))
                blocks[current].append(op_id)
        return blocks

    def seconds(self, ops: list[int]) -> float:
        return sum(self.linear.problem.profile.op_time_s[i] for i in ops)

    @cached_property
    def output(self) -> list[set[int]]:
        """Returns a: the values of each block that cross the cut after it."""
        output: list[set[int]] = [set() for _ in self.forward]
        for v, s in self.block_of.items():
            if self.linear.last_forward_read[v] > self.linear.position[self.forward[s][-1]]:
                output[s].add(v)
        return output

    def sizes(self, sets: list[set[int]]) -> list[int]:
        """Returns the bytes of sets of values.

        They are ω_a for ``output``, ω_ā for ``saved``, and ω_δ for ``gradients``.
        """
        values = self.linear.problem.graph.values
        return [sum(values[v].nbytes for v in one) for one in sets]

    @cached_property
    def saved(self) -> list[set[int]]:
        """Returns ā: the values of each block that its backward stage or a later block reads."""
        graph, readers = self.linear.problem.graph, self.linear.problem.graph.readers
        saved: list[set[int]] = [set() for _ in self.forward]
        inside = [set(ops) for ops in self.forward]
        for v, s in self.block_of.items():
            read_later = any(r in graph.needed and r not in inside[s] for r in readers[v])
            if v in graph.outputs or read_later:
                saved[s].add(v)
        return saved

    def _peak(self, ops: list[int], alive: set[int], kept: set[int]) -> int:
        """Returns the most bytes held while ``ops`` run once.

        The values ``alive`` and those that the ops compute count; the values ``kept`` stay to the
        end.
        """
        problem = self.linear.problem
        graph = problem.graph
        last = {
            v: at for at, i in enumerate(ops) for v in (*graph.ops[i].outputs, *graph.ops[i].inputs)
        }
        held_values = set(alive)
        held = peak = sum(graph.values[v].nbytes for v in held_values)
        for at, i in enumerate(ops):
            for v in graph.ops[i].outputs:
                if v not in held_values:
                    held_values.add(v)
                    held += graph.values[v].nbytes
            peak = max(peak, held + problem.profile.op_workspace_bytes[i])
            for v in (*graph.ops[i].inputs, *graph.ops[i].outputs):
                if v in held_values and last[v] == at and v not in kept:
                    held_values.remove(v)
                    held -= graph.values[v].nbytes
        return peak

    @cached_property
    def forward_all_peak(self) -> list[int]:
        """Returns bytes a block needs beside its input to run forward and save everything."""
        return [self._peak(ops, set(), self.saved[s]) for s, ops in enumerate(self.forward)]

    @cached_property
    def forward_none_peak(self) -> list[int]:
        """Returns bytes a block needs beside its input to run forward and keep only its output."""
        return [self._peak(ops, set(), self.output[s]) for s, ops in enumerate(self.forward)]

    @cached_property
    def gradients(self) -> list[set[int]]:
        """Returns δ: the backward phase's values alive when each block's backward stage begins."""
        graph, readers = self.linear.problem.graph, self.linear.problem.graph.readers
        stage_of = {i: s for s, ops in enumerate(self.backward) for i in ops}
        alive: list[set[int]] = [set() for _ in self.backward]
        for i, made_at in stage_of.items():
            for v in graph.ops[i].outputs:
                last = min((stage_of[r] for r in readers[v] if r in stage_of), default=made_at)
                until = 0 if v in graph.outputs else last
                for s in range(until, made_at):
                    alive[s].add(v)
        return alive

    @cached_property
    def backward_peak(self) -> list[int]:
        """Returns bytes a block's backward stage needs beside the block's input.

        The block's saved values and δ are included.
        """
        peaks = []
        for s, ops in enumerate(self.backward):
            after = self.gradients[s - 1] if s else set(self.linear.problem.graph.outputs)
            peaks.append(self._peak(ops, self.saved[s] | self.gradients[s], after))
        return peaks


class Table:
    """Holds C(s, t, m) for all blocks and amounts of memory.

    Args:
        stages: the chain.
        unit_bytes: bytes per unit of memory.
        units: amounts of memory 0 to ``units`` are solved.
    """

    def __init__(self, stages: Stages, unit_bytes: int, units: int):
        self.stages, self.units = stages, units
        n = len(stages.forward)

        def up(nbytes: int) -> int:
            return min(units + 1, -(-nbytes // unit_bytes))

        output_bytes, gradient_bytes = stages.sizes(stages.output), stages.sizes(stages.gradients)
        self.output = [up(b) for b in output_bytes]
        self.saved = [up(b) for b in stages.sizes(stages.saved)]
        forward_s = [stages.seconds(ops) for ops in stages.forward]
        both_s = [
            f + stages.seconds(ops) for f, ops in zip(forward_s, stages.backward, strict=True)
        ]
        until = np.concatenate([[0.0], np.cumsum(forward_s)])
        self.cost = np.full((n, n, units + 1), np.inf)
        # s' of C1, or s for "save everything"
        self.choice = np.full((n, n, units + 1), -1, dtype=np.int16)
        amounts = np.arange(units + 1)
        for length in range(n):
            for s in range(n - length):
                t = s + length
                all_need = up(
                    max(stages.forward_all_peak[s] + gradient_bytes[t], stages.backward_peak[s])
                )
                if s == t:
                    self.cost[s, s, all_need:] = both_s[s]
                    self.choice[s, s, all_need:] = s
                    continue
                none_peak = max(
                    [stages.forward_none_peak[s]]
                    + [output_bytes[j - 1] + stages.forward_none_peak[j] for j in range(s + 1, t)]
                )
                none_need = up(none_peak + gradient_bytes[t])
                left = amounts - self.saved[s]
                save_all = (
                    np.where(left >= 0, self.cost[s + 1, t, np.maximum(left, 0)], np.inf)
                    + both_s[s]
                )
                save_all[:all_need] = np.inf
                next_kept = np.arange(s + 1, t + 1)
                left = (
                    amounts[None, :] - np.asarray([self.output[j - 1] for j in next_kept])[:, None]
                )
                above = np.take_along_axis(
                    self.cost[s + 1 : t + 1, t, :], np.maximum(left, 0), axis=1
                )
                above[left < 0] = np.inf
                save_input = above + self.cost[s, s:t, :] + (until[next_kept] - until[s])[:, None]
                save_input[:, :none_need] = np.inf
                best = np.argmin(save_input, axis=0)
                best_cost = save_input[best, amounts]
                keep_all = save_all <= best_cost
                self.cost[s, t] = np.where(keep_all, save_all, best_cost)
                self.choice[s, t] = np.where(
                    np.isinf(self.cost[s, t]), -1, np.where(keep_all, s, next_kept[best])
                )

    def actions(self, units: int) -> list[tuple[str, int]]:
        """Returns the schedule for an amount of memory, as a list of actions.

        An action is ``("all" | "input" | "none" | "backward", block)``. ``"input"`` runs a block
        forward and keeps its input, ``"none"`` drops the input as well.
        """
        actions: list[tuple[str, int]] = []
        stack: list[tuple[int, int, int]] = [(0, len(self.stages.forward) - 1, units)]
        while stack:
            s, t, m = stack.pop()
            if t < 0:
                actions.append(("backward", s))
                continue
            choice = int(self.choice[s, t, m])
            if choice == s:
                actions.append(("all", s))
                stack.append((s, -1, 0))
                if t > s:
                    stack.append((s + 1, t, m - self.saved[s]))
            else:
                actions.append(("input", s))
                actions += [("none", j) for j in range(s + 1, choice)]
                stack.append((s, choice - 1, m))
                stack.append((choice, t, m - self.output[choice - 1]))
        return actions


def action_order(stages: Stages, actions: list[tuple[str, int]]) -> list[int]:
    """Returns the order that a list of actions stands for.

    First runs happen in any case, and values that are still missing are recomputed on demand. As
    the program assumes, the input of a block is dropped after its backward stage unless the block
    before saved it.
    """
    graph = stages.linear.problem.graph
    made = [[v for i in ops for v in graph.ops[i].outputs] for ops in stages.forward]

    def policy(walk: Walk) -> None:
        ran: set[int] = set()
        saved: set[int] = set()  # blocks whose last run saved everything
        for action, s in actions:
            if action == "backward":
                for op_id in stages.backward[s]:
                    walk.demand(op_id)
                walk.drop(made[s])
                if s > 0 and s - 1 not in saved:
                    walk.drop(stages.output[s - 1])
                continue
            (saved.add if action == "all" else saved.discard)(s)
            for op_id in stages.forward[s]:
                if op_id not in ran or not all(v in walk.alive for v in graph.ops[op_id].outputs):
                    walk.demand(op_id)
                    ran.add(op_id)
            if action != "all":
                walk.drop(v for v in made[s] if v not in stages.output[s])
            if action == "none":
                walk.drop(stages.output[s - 1])

    return order_of(stages.linear.problem, policy)


def solve(incumbent: Incumbent, seed: int) -> None:
    """Offers the best persistent schedules of the chain.

    On other graphs, it is the chain of blocks between articulation points.
    """
    problem = incumbent.problem
    if incumbent.offer_store_all() or problem.budget_bytes is None:
        return
    linear = Linearized(problem)
    cuts = linear.articulation_cuts
    if not cuts:
        incumbent.reason = "the graph is no chain: its forward phase has no articulation point"
        return
    if not linear.comes_first:
        incumbent.reason = "the graph is no chain: a forward op must follow a backward one"
        return
    stride = -(-len(cuts) // MAX_STAGES)
    stages = Stages(linear, cuts[::stride])
    room = problem.budget_bytes - problem.profile.resident_bytes
    unit = max(1, -(-room // UNITS))
    table = Table(stages, unit, int(-(-room // unit) * SPARE))
    tried: set[tuple[tuple[str, int], ...]] = set()
    for units in sorted(range(table.units + 1), key=lambda u: abs(u - room // unit)):
        if incumbent.deadline.is_over or len(tried) == MAX_PLANS:
            break
        if np.isinf(table.cost[0, -1, units]):
            continue
        actions = table.actions(units)
        if tuple(actions) not in tried:
            tried.add(tuple(actions))
            order = action_order(stages, actions)
            if incumbent.offer(order):
                incumbent.offer(trimmed(problem, order))
