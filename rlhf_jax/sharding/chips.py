"""The accelerators that runs are planned for, and how to compile without them.

XLA can compile for devices that are not there: the compiler is in a package
(`pip install 'rlhf_jax[plan-gpu]'` or `[plan-tpu]`), and what it must know of a
chip is here.  The same numbers give rooflines and `perf/mfu`.
"""

import dataclasses
import importlib.util

import jax

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Gpu:
  """What the compiler asks about a CUDA device; NVIDIA's white papers."""

  cores: int  # streaming multiprocessors
  capability: str  # '9.0'
  fpus_per_core: int  # float32 lanes
  clock_ghz: float  # boost
  l2_bytes: int
  shared_per_core: int  # bytes of shared memory
  shared_per_block: int  # bytes, the most that a block may ask for


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device; rates are the makers' peaks, in each direction."""

  name: str  # in a target, as 'h100' in 'h100:128x8'
  platform: str  # 'cuda', 'tpu' or 'cpu'
  kinds: tuple[str, ...]  # parts of `device_kind` that name it
  flops: float | None = None  # FLOP/s, dense bfloat16
  memory_bytes: int | None = None
  memory_rate: float | None = None  # bytes/s
  link_rate: float | None = None  # bytes/s to the devices of its node or torus
  network_rate: float | None = None  # bytes/s to other nodes; None: no nodes
  example: str = '4x4'  # sizes of a target; a torus has as many as here
  gpu: Gpu | None = None


@dataclasses.dataclass(frozen=True)
class Target:
  """Devices to plan for: 'h100:128x8' is 128 nodes of 8."""

  chip: Chip
  sizes: tuple[int, ...]

  @property
  def count(self) -> int:
    total = 1
    for size in self.sizes:
      total *= size
    return total

  def __str__(self) -> str:
    return f'{self.chip.name}:{"x".join(map(str, self.sizes))}'


def parse(text: str) -> Target:
  """'h100:8' (one node), 'h100:128x8', 'v5p:8x16x8' (a torus), 'cpu:8'.

  Raises:
    ValueError: unknown chip, or sizes that it cannot have.
  """
  name, _, sizes = text.partition(':')
  if name not in CHIPS:
    raise ValueError(
      f'target {text!r}: no chip {name!r}, choose one of {sorted(CHIPS)}'
    )
  chip = CHIPS[name]
  try:
    numbers = tuple(int(x) for x in sizes.split('x'))
  except ValueError:
    numbers = ()
  dimensions = chip.example.count('x') + 1
  allowed = (1, 2) if chip.platform == 'cuda' else (dimensions,)
  if len(numbers) not in allowed or min(numbers) < 1:
    raise ValueError(
      f'target {text!r}: expected sizes like {name}:{chip.example}, got'
      f' {sizes!r}'
    )
  return Target(chip, numbers)


def environment(target: Target) -> dict[str, str]:
  """Variables to set before JAX starts, without which it cannot compile."""
  common = {'JAX_PLATFORMS': 'cpu', 'HF_HUB_OFFLINE': '1'}
  if target.chip.platform == 'cuda':
    return common | {
      'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1',  # there is no driver to check
      # Autotuning runs candidates on the device.  Without it XLA would take
      # Triton for every product (a device mostly prefers cuBLAS), and that of
      # jax 0.10.2 aborts over some: one row of Qwen2-7B per device.
      'XLA_FLAGS': (
        '--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false'
      ),
    }
  if target.chip.platform == 'tpu':
    return common | {
      'TPU_SKIP_MDS_QUERY': '1',  # there is no metadata server to ask
      'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # no device to be shared either
    }
  count = f'--xla_force_host_platform_device_count={target.count}'
  return common | {'XLA_FLAGS': count}


def extra(target: Target) -> str | None:
  """The extra of setup.cfg that the target needs and that is not there."""
  needs = {
    'cuda': ('jax_plugins.xla_cuda13', 'plan-gpu'),
    'tpu': ('libtpu', 'plan-tpu'),
  }
  if target.chip.platform not in needs:
    return None
  module, name = needs[target.chip.platform]
  try:
    found = importlib.util.find_spec(module)
  except ModuleNotFoundError:  # of the package around it
    found = None
  return None if found else name


def devices(target: Target) -> list[jax.Device]:
  """The target's devices; GPUs and TPUs can be compiled for, nothing else.

  `environment(target)` was in force when JAX started.
  """
  from jax.experimental import topologies

  chip = target.chip
  if chip.platform == 'cpu':
    found = jax.devices('cpu')
    if len(found) < target.count:
      raise ValueError(
        f'{len(found)} CPU devices, expected {target.count}: set XLA_FLAGS to'
        f' {environment(target)["XLA_FLAGS"]} before Python starts'
      )
    return found[: target.count]
  if chip.platform == 'tpu':
    sizes = 'x'.join(map(str, target.sizes))
    return topologies.get_topology_desc(
      platform='tpu', topology_name=f'{chip.name}:{sizes}'
    ).devices
  nodes, each = (1, *target.sizes)[-2:]
  return topologies.get_topology_desc(
    platform='cuda',
    topology_name=chip.name,
    topology=f'1x{nodes}x{each}',
    target_config=target_config(chip),
  ).devices


def target_config(chip: Chip) -> str:
  """The text form of XLA's `GpuTargetConfigProto` of a CUDA device."""
  gpu = chip.gpu
  major = gpu.capability.split('.')[0]
  return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024
      threads_per_warp: 32
      threads_per_core_limit: 2048
      block_dim_limit_x: 2147483647
      block_dim_limit_y: 65535
      block_dim_limit_z: 65535
      registers_per_core_limit: 65536
      registers_per_block_limit: 65536
      shared_memory_per_block: 49152
      shared_memory_per_block_optin: {gpu.shared_per_block}
      shared_memory_per_core: {gpu.shared_per_core}
      core_count: {gpu.cores}
      fpus_per_core: {gpu.fpus_per_core}
      clock_rate_ghz: {gpu.clock_ghz}
      l2_cache_size: {gpu.l2_bytes}
      memory_bandwidth: {int(chip.memory_rate)}
      device_memory_size: {chip.memory_bytes}
      cuda_compute_capability {{ major: {major} }}
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
    device_description_str: "{chip.kinds[0]}"
  """


def of_device(device: jax.Device) -> Chip | None:
  """The chip of a device, None if it is in no table."""
  kind = device.device_kind
  # The longest name that fits: 'TPU v5' is in 'TPU v5 lite'.
  found = [
    (len(name), chip.name)
    for chip in CHIPS.values()
    for name in chip.kinds
    if name in kind
  ]
  return CHIPS[max(found)[1]] if found else None


_HOPPER = Gpu(
  cores=132,
  capability='9.0',
  fpus_per_core=128,
  clock_ghz=1.98,
  l2_bytes=50 * 2**20,
  shared_per_core=228 * 1024,
  shared_per_block=227 * 1024,
)

CHIPS = {
  chip.name: chip
  for chip in (
    # NVIDIA H100 data sheet (SXM): 989 TFLOP/s, 80 GB, 3.35 TB/s, NVLink 900
    # GB/s both ways together; DGX H100 user guide: one 400 Gb/s port per GPU.
    Chip(
      name='h100',
      platform='cuda',
      kinds=('H100',),
      flops=989e12,
      memory_bytes=80 * GIB,
      memory_rate=3.35e12,
      link_rate=450e9,
      network_rate=50e9,
      example='128x8',
      gpu=_HOPPER,
    ),
    # NVIDIA H200 data sheet (SXM): 141 GB, 4.8 TB/s, all else as the H100.
    Chip(
      name='h200',
      platform='cuda',
      kinds=('H200',),
      flops=989e12,
      memory_bytes=140 * GIB,  # 143,771 MiB, as nvidia-smi counts
      memory_rate=4.8e12,
      link_rate=450e9,
      network_rate=50e9,
      example='128x8',
      gpu=_HOPPER,
    ),
    # NVIDIA A100 80GB data sheet (SXM): 312 TFLOP/s, 2,039 GB/s, NVLink 600
    # GB/s both ways; DGX A100 user guide: one 200 Gb/s port per GPU.
    Chip(
      name='a100',
      platform='cuda',
      kinds=('A100',),
      flops=312e12,
      memory_bytes=80 * GIB,
      memory_rate=2.039e12,
      link_rate=300e9,
      network_rate=25e9,
      example='128x8',
      gpu=Gpu(
        cores=108,
        capability='8.0',
        fpus_per_core=64,
        clock_ghz=1.41,
        l2_bytes=40 * 2**20,
        shared_per_core=164 * 1024,
        shared_per_block=163 * 1024,
      ),
    ),
    # cloud.google.com/tpu/docs/v5p: 459 TFLOP/s, 95 GB, 2,765 GB/s, 4,800 Gb/s
    # between chips (six links of a torus, both ways together).
    Chip(
      name='v5p',
      platform='tpu',
      kinds=('TPU v5p', 'TPU v5'),
      flops=459e12,
      memory_bytes=int(95e9),
      memory_rate=2.765e12,
      link_rate=300e9,
      example='8x16x8',
    ),
    # cloud.google.com/tpu/docs/v5e: 197 TFLOP/s, 16 GB, 819 GB/s, 1,600 Gb/s
    # between chips (four links, both ways together).
    Chip(
      name='v5e',
      platform='tpu',
      kinds=('TPU v5 lite', 'TPU v5e'),
      flops=197e12,
      memory_bytes=16 * GIB,
      memory_rate=819e9,
      link_rate=100e9,
    ),
    # cloud.google.com/tpu/docs/v6e: 918 TFLOP/s, 32 GB, 1,638 GB/s, 3,584 Gb/s.
    Chip(
      name='v6e',
      platform='tpu',
      kinds=('TPU v6 lite', 'TPU v6e'),
      flops=918e12,
      memory_bytes=32 * GIB,
      memory_rate=1.638e12,
      link_rate=224e9,
    ),
    # cloud.google.com/tpu/docs/v4: 275 TFLOP/s, 32 GiB, 1,228 GB/s, 2,400 Gb/s.
    Chip(
      name='v4',
      platform='tpu',
      kinds=('TPU v4',),
      flops=275e12,
      memory_bytes=32 * GIB,
      memory_rate=1.228e12,
      link_rate=150e9,
      example='4x4x4',
    ),
    # No roofline: simulated devices share the cores of one machine.
    Chip(name='cpu', platform='cpu', kinds=('cpu',), example='8'),
  )
}
