"""Mixture of experts: each token passes the MLPs that a router chooses for it, and their results are added by weight.

Exact under batching: the router looks at one row; an expert's product of a row depends on that row alone, whatever
others were gathered for it; a row's experts are added in float32 in the order of their numbers, and rounded once.

    x -- router --> k experts and weights a token
    x rows of expert 0 | rows of expert 1 | ...   --gate, up, down--> the same order --by token--> sum of weight * row

Letters: T tokens, E experts, k experts a token, H hidden_size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedllm.model.buffers import StepRows
from pagedllm.model.config import ModelConfig, MoeConfig
from pagedllm.model.host_memory import Memory
from pagedllm.model.linear import NO_EPILOGUE, Epilogue, Linear, LinearShape, WeightFormat, WeightSlot
from pagedllm.model.mlp import MLP
from pagedllm.ops.linear import gather_rows


def router_shape(config: ModelConfig, moe: MoeConfig) -> LinearShape:
    return LinearShape(config.hidden_size, (moe.num_experts,), has_bias=moe.has_router_bias)


def shared_gate_shape(config: ModelConfig) -> LinearShape:
    return LinearShape(config.hidden_size, (1,))


class MoE:
    def __init__(self, config: ModelConfig, weight_format: WeightFormat, memory: Memory, namespace: str) -> None:
        assert config.moe is not None
        self.moe = moe = config.moe
        self.namespace = namespace
        self.router = Linear(router_shape(config, moe), weight_format, memory)
        self.experts = [
            MLP(config, moe.intermediate_size, weight_format, memory, namespace) for _ in range(moe.num_experts)
        ]
        self.shared: MLP | None = None
        if moe.shared_intermediate_size:
            self.shared = MLP(config, moe.shared_intermediate_size, weight_format, memory, namespace)
            self.shared_gate = Linear(shared_gate_shape(config), weight_format, memory)

    @staticmethod
    def num_bytes(config: ModelConfig, weight_format: WeightFormat) -> int:
        """What the constructor takes of `memory`."""
        assert config.moe is not None
        moe = config.moe
        shared = 0
        if moe.shared_intermediate_size:
            shared = MLP.num_bytes(config, moe.shared_intermediate_size, weight_format)
            shared += Linear.num_bytes(shared_gate_shape(config), weight_format)
        experts = moe.num_experts * MLP.num_bytes(config, moe.intermediate_size, weight_format)
        return Linear.num_bytes(router_shape(config, moe), weight_format) + experts + shared

    def slots(self) -> dict[str, WeightSlot]:
        slots = self.router.slots("router")
        for index, expert in enumerate(self.experts):
            slots |= {f"experts.{index}.{name}": slot for name, slot in expert.slots().items()}
        if self.shared is not None:
            slots |= {f"shared.{name}": slot for name, slot in self.shared.slots().items()}
            slots |= self.shared_gate.slots("shared_gate")
        return slots

    def forward(self, rows: StepRows, x: Tensor, out: Tensor, epilogue: Epilogue = NO_EPILOGUE) -> None:
        """out = epilogue(moe(x)), both [T, H]; rows.moe is overwritten."""
        buffers = rows.moe
        assert buffers is not None
        num_rows = len(x)
        total = buffers.total[:num_rows].zero_()
        expert_ids, weights = self._route(x, buffers.router_logits[:num_rows])
        places = self._run_experts(rows, x, expert_ids)
        for choice in range(self.moe.num_experts_per_token):
            chosen = buffers.gathered[:num_rows]
            gather_rows(self.namespace, chosen, buffers.expert_out, places[:, choice].contiguous())
            total.add_(chosen.float().mul_(weights[:, choice : choice + 1]))
        if self.shared is not None:
            total.add_(self._shared_result(rows, x))
        if epilogue.residual is not None:
            total.add_(epilogue.residual)
        out.copy_(total)

    def _route(self, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts of each token in the order of their numbers, [T, k] int64, and their weights, float32."""
        self.router.apply(self.namespace, logits, x)
        weights, expert_ids = logits.softmax(-1).topk(self.moe.num_experts_per_token, -1)
        if self.moe.is_normalized:
            columns = weights.unbind(-1)
            total = columns[0].clone()
            for column in columns[1:]:  # one after the other: a reduction's order may depend on the number of rows
                total.add_(column)
            weights = weights / total[:, None]
        expert_ids, order = expert_ids.sort(-1)
        return expert_ids, weights.gather(-1, order)

    def _run_experts(self, rows: StepRows, x: Tensor, expert_ids: Tensor) -> Tensor:
        """Fills rows.moe.expert_out, expert by expert; where each token's results lie in it, [T, k] int32."""
        buffers = rows.moe
        assert buffers is not None
        by_expert = expert_ids.flatten().argsort(stable=True)
        tokens = (by_expert // self.moe.num_experts_per_token).int()
        counts = expert_ids.flatten().bincount(minlength=self.moe.num_experts).tolist()
        begin = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                gathered = buffers.gathered[:count]
                gather_rows(self.namespace, gathered, x, tokens[begin : begin + count])
                expert.run(buffers.intermediate[:count], gathered, buffers.expert_out[begin : begin + count])
                begin += count
        places = torch.empty_like(tokens)
        places[by_expert] = torch.arange(len(by_expert), dtype=torch.int32, device=places.device)
        return places.view(expert_ids.shape)

    def _shared_result(self, rows: StepRows, x: Tensor) -> Tensor:
        """sigmoid(gate(x)) * shared(x), [T, H] float32."""
        buffers = rows.moe
        assert buffers is not None
        assert self.shared is not None
        result = buffers.gathered[: len(x)]
        self.shared.run(buffers.shared_intermediate[: len(x)], x, result)
        gates = buffers.shared_gates[: len(x)].zero_()
        self.shared_gate.apply(self.namespace, gates[:, :1], x)
        share = gates.softmax(-1)[:, :1]  # of (gate, 0): its sigmoid; torch's own may differ with a row's place
        return result.float().mul_(share)
