"""Descriptions of GPUs for which graphs can be compiled without the hardware.

XLA describes a GPU by a text proto (`GpuTargetConfigProto`). `GPU_KINDS` has the fields that differ
between kinds. The other fields are the limits of compute capability 8.0 and 9.0
(docs.nvidia.com/cuda/cuda-c-programming-guide, "Technical Specifications per Compute Capability").
Names, clock, bandwidth and memory are those that the devices report, as in XLA's
`xla/backends/gpu/target_config/specs` (a100_sxm_80, h100_sxm, h200). Knows nothing of graphs.
"""

from dataclasses import dataclass, replace

GPUS_PER_HOST = 8
"""GPUs of an HGX board. NVLink connects these; hosts are connected by a network."""


@dataclass(frozen=True)
class GpuKind:
    """The properties of one GPU that the compiler needs; memory in bytes."""

    device_names: tuple[str, ...]
    """The names that devices report; the first is the one in XLA's description."""
    capability: str
    """Compute capability, as fields of a proto."""
    cores: int
    """Number of streaming multiprocessors."""
    float32_units: int
    """Float32 units of each streaming multiprocessor."""
    clock_ghz: float
    memory_bytes: int
    memory_rate: int
    """Bytes per second of the main memory."""
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    """Maximum for a kernel that asks for more than the usual 48 KiB."""

    def target_config(self) -> str:
        """The text proto that XLA's CUDA plugin takes for an absent GPU."""
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ {self.capability} }}
              core_count: {self.cores}
              fpus_per_core: {self.float32_units}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory_bytes}
              memory_bandwidth: {self.memory_rate}
              l2_cache_size: {self.l2_bytes}
              shared_memory_per_core: {self.shared_bytes_per_core}
              shared_memory_per_block: {48 << 10}
              shared_memory_per_block_optin: {self.shared_bytes_per_block}
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: 2048
              registers_per_core_limit: {64 << 10}
              registers_per_block_limit: {64 << 10}
              block_dim_limit_x: {(1 << 31) - 1}
              block_dim_limit_y: {(1 << 16) - 1}
              block_dim_limit_z: {(1 << 16) - 1}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.device_names[0]}"
        """


_H100 = GpuKind(
    device_names=("NVIDIA H100 80GB HBM3",),
    # only code for exactly 9.0 (sm_90a) may use the instructions of its matrix units
    capability="major: 9 feature_extension: ACCELERATED_FEATURES",
    cores=132,
    float32_units=128,
    clock_ghz=1.98,
    memory_bytes=84_942_979_072,
    memory_rate=3_352_320_000_000,
    l2_bytes=50 << 20,
    shared_bytes_per_core=228 << 10,
    shared_bytes_per_block=227 << 10,
)
GPU_KINDS = {
    "a100": GpuKind(
        device_names=("NVIDIA A100-SXM4-80GB",),
        capability="major: 8",
        cores=108,
        float32_units=64,
        clock_ghz=1.41,
        memory_bytes=85_100_068_864,
        memory_rate=2_039_040_000_000,
        l2_bytes=40 << 20,
        shared_bytes_per_core=164 << 10,
        shared_bytes_per_block=163 << 10,
    ),
    "h100": _H100,
    "h200": replace(
        _H100,
        # the second is the name in vLLM's tables of measured devices (fused_moe/configs)
        device_names=("NVIDIA H200 141GB HBM3e", "NVIDIA H200"),
        memory_bytes=151_397_597_184,
        memory_rate=4_800_000_000_000,
    ),
}
"""Descriptions by name; hardware tables use the same names."""


def host_topology(count: int) -> str | None:
    """Topology `slices x hosts x GPUs of a host` for `count` GPUs.

    None if there are several hosts, and one of them is not full.
    """
    if count <= GPUS_PER_HOST:
        return f"1x1x{count}"
    hosts, rest = divmod(count, GPUS_PER_HOST)
    return None if rest else f"1x{hosts}x{GPUS_PER_HOST}"
