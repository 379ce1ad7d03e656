"""Benchmarks' facts as a few lines of text each. Knows the JSON form only."""

from __future__ import annotations

from typing import Any


def format_throughput(facts: dict[str, Any]) -> str:
    repetitions = len(facts["engines"][0]["tokens_per_second"])
    lines = [
        f"{facts['workload']}: {facts['num_requests']} requests, {facts['num_prompt_tokens']:,} prompt tokens, "
        f"{facts['num_output_tokens']:,} output tokens; {facts['cpu']}, {facts['num_threads']} threads",
        f"{'engine':<28}{'output tokens/s':>16}{'pagedllm is':>14}   (median of {repetitions})",
    ]
    for engine in facts["engines"]:
        lines += _engine_lines(engine)
    if facts["second_call"]:
        lines.append("the same requests again, in a second call:")
        for engine in facts["second_call"]:
            lines += _engine_lines(engine)
    return "\n".join(lines)


def _engine_lines(engine: dict[str, Any]) -> list[str]:
    ratio = "" if engine["ratio"] is None else f"{engine['ratio']:.2f} x"
    lines = [f"{engine['engine']:<28}{engine['median']:>16,.1f}{ratio:>14}"]
    work = engine["work"]
    if work is not None:
        lines += [
            f"{'':<4}{work['gflops']:,.0f} GFLOP/s over the call, {work['linear_share']:.0%} of our own products' "
            f"{work['linear_gflops']:,.0f} at 512 rows; {work['num_computed_tokens']:,} tokens computed",
            f"{'':<4}KV waste {work['kv_waste']:.2%} of the allocated slots, summed over the steps",
        ]
        if work["weight_read_share"] is not None:
            lines.append(
                f"{'':<4}weights read at {work['weight_read_gbytes']:.1f} GB/s, {work['weight_read_share']:.0%} of "
                f"what a 270 MB buffer is read at, {work['read_gbytes']:.1f} GB/s"
            )
    return lines


def format_kernels(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['model']}, {facts['dtype']}, {facts['kernel_set']}; {facts['cpu']}, {facts['num_threads']} threads; "
        f"floors: {facts['read_gbytes']:.1f} GB/s (a 270 MB buffer read), {facts['peak_gflops']:,.0f} GFLOP/s (the "
        "best product)",
        f"{'kernel':<24}{'shape':<28}{'us':>11}{'GFLOP/s':>10}{'GB/s':>8}{'floor us':>11}{'share':>8}",
    ]
    for kernel in facts["kernels"]:
        seconds = kernel["seconds"]
        gflops, gbytes = kernel["flops"] / seconds / 1e9, kernel["bytes"] / seconds / 1e9
        lines.append(
            f"{kernel['kernel']:<24}{kernel['shape']:<28}{seconds * 1e6:>11,.1f}{gflops:>10,.1f}{gbytes:>8,.1f}"
            f"{kernel['floor_seconds'] * 1e6:>11,.1f}{kernel['share']:>8.0%}"
            f"  {kernel['floor']}"
        )
    return "\n".join(lines)


def format_host(facts: dict[str, Any]) -> str:
    lines = [
        f"a step without the model, microseconds; {facts['cpu']}, {facts['num_threads']} threads",
        f"{'running':>8}{'waiting':>9}{'step':>10}{'schedule':>10}{'execute':>10}{'update':>10}{'a request':>11}",
    ]
    for step in facts["steps"]:
        parts = "".join(
            f"{step[f'{part}_seconds'] * 1e6:>10,.1f}" for part in ("step", "schedule", "execute", "update")
        )
        each = step["step_seconds"] * 1e6 / step["num_running"]
        lines.append(f"{step['num_running']:>8,}{step['num_waiting']:>9,}{parts}{each:>11,.2f}")
    return "\n".join(lines)
