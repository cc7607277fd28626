"""Costs of a setup: which cost models, measured files and facts about host and network hold for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lumos.costs.contention import rail_blocks, userbuffers_blocks
from lumos.costs.energy import InStepFactors, in_step_factors
from lumos.costs.hardware_model import HardwareModel, hardware_model
from lumos.costs.model_costs import ModelCosts, flash_kernels
from lumos.costs.network import Network, network_of
from lumos.costs.operator_model import CostModel, cost_model
from lumos.costs.sampled_network import SampledNetwork
from lumos.schedules import schedule_named
from lumos.setup.frameworks import Framework, framework_named
from lumos.setup.gpus import Gpu
from lumos.setup.setup import Setup


def costs_of(
    setup: Setup,
    factors: InStepFactors | None = None,
    model: CostModel | None = None,
    network: Network | None = None,
    make_costs: Callable[..., ModelCosts] = ModelCosts,
) -> ModelCosts:
    """What operators, collectives and blocks cost in a setup."""
    gpu, chip = setup.cluster.accelerator, setup.cluster.chip
    framework = framework_named(setup.train.framework, setup.train.precision)
    machine = hardware_model(setup.cluster.model) if setup.cluster.model else None
    factors = factors or (machine.factors(gpu) if machine else in_step_factors(gpu))
    costs = make_costs(
        model or (machine.operators(chip) if machine else cost_model(chip)),
        network or _network(setup, gpu, factors, machine), factors, _host_us(setup, framework),
        framework.collective_launches, host_speed(setup),
    )  # fmt: skip
    flash = (framework.compiled_flash if setup.train.compile else "") or framework.flash
    flash = "native" if setup.train.attention == "flash-3" else flash
    costs.flash_model = None if gpu.is_cpu else flash_kernels(chip, flash)
    costs.joules = (machine.joules(chip) if machine else None) or costs.joules
    costs.overlap_blocks = userbuffers_blocks() if framework.userbuffers else 0
    flex = (setup.parallel.dispatcher or framework.dispatcher) == "flex"
    costs.exchange_blocks = rail_blocks() if flex and schedule_named(setup.parallel.schedule).pairs else 0
    costs.leaves_sms = framework.leaves_sms
    costs.block_scaled = framework.block_scaled or setup.train.fp8_scaling == "block"
    return costs


def _network(setup: Setup, gpu: Gpu, factors: InStepFactors, machine: HardwareModel | None) -> Network | SampledNetwork:
    """The collectives that were sampled, where the cluster is theirs; else those of the GPU and its fabric."""
    own = framework_named(setup.train.framework).dispatcher == "flex"
    rails = own and setup.parallel.dispatcher in ("", "flex")
    usual = network_of(_wired(setup, gpu), setup.cluster.fabric, factors, setup.cluster, rails)
    if machine is None or setup.cluster.states_network or machine.gpu.name != setup.cluster.gpu:
        return usual
    return machine.network(usual, setup.cluster.gpus_per_node)


def _wired(setup: Setup, gpu: Gpu) -> Gpu:
    """The GPU with the links it really uses: inside one node, what NVLink does not join is joined by PCIe."""
    if gpu.nvlink_domain < setup.cluster.gpus <= gpu.gpus_per_node:
        return dataclasses.replace(gpu, inter_gb_s=gpu.pcie_gb_s)
    return gpu


def _host_us(setup: Setup, framework: Framework) -> float:
    """What one launch costs the host."""
    sampled_with_host = bool(setup.cluster.model) and setup.cluster.accelerator.is_cpu
    if setup.train.cuda_graphs or sampled_with_host:
        return 0.0
    return framework.host_us / host_speed(setup)


def host_was_measured(setup: Setup) -> bool:
    """Whether the model file of a setup knows the host."""
    return bool(setup.cluster.model) and hardware_model(setup.cluster.model).section("host") is not None


def host_speed(setup: Setup) -> float:
    """Of the host, relative to the typical one."""
    machine = hardware_model(setup.cluster.model) if setup.cluster.model else None
    return setup.cluster.host * (machine.host_speed if machine else 1.0)
