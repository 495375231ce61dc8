"""The catalogue of GPUs: memory, rates and features of cards that need not be installed.

Rates are the vendor's for dense matrices (data sheets print twice as much "with sparsity") accumulated in float32, as
PyTorch does; a GeForce card has half the advertised rate for that. None stands where no figure was found. Measured
rates are better: `surefit calibrate` measures them, and `plan.time` prefers them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from surefit.core.errors import ConfigError
from surefit.core.units import GIB, MIB, bytes_text

AMD_UNTESTED = "SureFit is for NVIDIA's CUDA: nothing was run on ROCm, this is arithmetic"
BF16_CAPABILITY = (8, 0)
"""NVIDIA GPUs multiply bfloat16 natively from compute capability 8.0 (Ampere) on:
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities."""
FP8_ARCHITECTURES = {"Ada", "Hopper", "Blackwell", "CDNA 3"}
FLASH_ATTENTION_2 = {"Ampere", "Ada", "Hopper", "Blackwell", "CDNA 2", "CDNA 3"}
"""Architectures that PyTorch's own flash attention runs on."""
FLASH_ATTENTION_3 = {"Hopper"}


@dataclass(frozen=True)
class GpuSpec:
    """A GPU model.

    Attributes:
        memory_bytes: memory as PyTorch reports it on the real card, not the advertised amount.
        compute_capability: NVIDIA's; None for other vendors.
        source: source of `memory_bytes`. "an upper bound" in it: PyTorch will report less.
        bf16, fp16, fp8, tf32, fp32: dense TFLOP/s of matrix products; fp32 without the tensor cores, PyTorch's default
            (`torch.backends.cuda.matmul`). None: not supported, or no figure was found.
        bandwidth: memory bandwidth in bytes per second.
        rates_source: source of the rates and the bandwidth.

    Raises:
        ConfigError: a card without memory.
    """

    name: str
    architecture: str
    memory_bytes: int
    compute_capability: tuple[int, int] | None
    source: str
    bf16: float | None
    fp16: float | None
    fp8: float | None
    tf32: float | None
    fp32: float | None
    bandwidth: float | None
    rates_source: str

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ConfigError(
                f"{self.name} has {bytes_text(self.memory_bytes)} of memory: nothing can be trained on it",
                code="E2067",
                field="hardware.gpu",
                help="name a GPU with memory, e.g. h100",
            )

    @property
    def multiplies_bf16(self) -> bool:
        """Return whether bfloat16 is multiplied natively."""
        return self.compute_capability is None or self.compute_capability >= BF16_CAPABILITY

    @property
    def assumed(self) -> str:
        """What a plan for this card assumes, in words; empty where its figures are the catalogue's and CUDA's."""
        if self.rates_source == GENERIC:
            gib = self.memory_bytes / GIB
            return f"Ampere or newer (bfloat16); PyTorch sees {gib:.1f} GiB of it"
        return AMD_UNTESTED if self.compute_capability is None else ""

    @property
    def features(self) -> tuple[str, ...]:
        """Names among bf16, fp8, flash-attention-2 and flash-attention-3 that the architecture supports."""
        supported = {
            "bf16": self.multiplies_bf16,
            "fp8": self.architecture in FP8_ARCHITECTURES,
            "flash-attention-2": self.architecture in FLASH_ATTENTION_2,
            "flash-attention-3": self.architecture in FLASH_ATTENTION_3,
        }
        return tuple(name for name, is_supported in supported.items() if is_supported)

    def flops(self, dtype: str) -> float | None:
        """Return FLOP/s of matrix products in a torch dtype; a card without bfloat16 computes it in float32."""
        by_name = {"bfloat16": self.bf16 if self.multiplies_bf16 else self.fp32, "float16": self.fp16}
        rate = by_name.get(dtype, self.fp32)
        return rate * 1e12 if rate is not None else None


GpuRates = tuple[float | None, float | None, float | None, float | None, float | None, float | None]
"""bf16, fp16, fp8, tf32, fp32 in TFLOP/s; bandwidth in GB/s."""


def _gpu(
    name: str,
    architecture: str,
    gib: float,
    capability: tuple[int, int] | None,
    source: str,
    rates: GpuRates,
    where: str,
) -> GpuSpec:
    bf16, fp16, fp8, tf32, fp32, bandwidth = rates
    speed = bandwidth * 1e9 if bandwidth is not None else None
    return GpuSpec(name, architecture, round(gib * GIB), capability, source, bf16, fp16, fp8, tf32, fp32, speed, where)


def _geforce(
    name: str,
    architecture: str,
    gib: float,
    capability: tuple[int, int],
    source: str,
    cores: int,
    boost: int,
    bandwidth: float,
    published: str | None,
) -> GpuSpec:
    """Return a GeForce card by its CUDA cores and boost clock in MHz: two operations per core and cycle in float32, and
    in the tensor cores, which accumulate in float32 here, a multiple of that by architecture.

    The white papers' own figures have these ratios: the RTX 2080 Ti's, 3090's, 4090's and 5090's.

    Args:
        published: a page on which cores, clock and bandwidth were read; None where none was found.
    """
    fp32 = 2 * cores * boost / 1e6
    half = _TENSOR_RATIO[architecture] * fp32
    ampere, fp8 = architecture != "Turing", architecture in FP8_ARCHITECTURES
    rates = (half if ampere else None, half, 2 * half if fp8 else None, half / 2 if ampere else None, fp32, bandwidth)
    rounded = tuple(None if rate is None else round(rate, 1) for rate in rates)
    where = f"{cores:,} CUDA cores at {boost:,} MHz, tensor cores by the architecture's ratio"
    where += f": {published}" if published else "; estimated: no published table was found to compare these with"
    return _gpu(name, architecture, gib, capability, source, rounded, where)  # type: ignore[arg-type]


def _mib(count: int) -> float:
    return count * MIB / GIB


_OOM = "'total capacity' in an out-of-memory message, github.com/"
_SMI = "nvidia-smi total, an upper bound, github.com/modal-labs/modal-client/pull/2797"
_SHEET = "vendor's data sheet, {} GB: an upper bound"
_NV = "NVIDIA data sheet, nvidia.com/content/dam/en-zz/Solutions/"
_V100 = "NVIDIA data sheet volta-v100-datasheet-update-us-1165301-r5, SXM2 (PCIe: 112 in float16)"
_TURING = "NVIDIA Turing architecture white paper WP-09183-001"
_GA102 = "NVIDIA white paper nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2"
_ADA = "NVIDIA white paper nvidia-ada-gpu-architecture"
_A100 = f"{_NV}Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_H100 = "NVIDIA data sheet, resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet, halved"
_HGX = (
    "NVIDIA data sheet of HGX B200 and B300, dense, as in "
    "datacrunch.io/blog/nvidia-b300-vs-b200-complete-gpu-comparison-to-date"
)
_A5000 = (
    "8,192 CUDA cores at 1,695 MHz, bandwidth: cpu-gpu.alldbin.com/graphics-card-comparison/"
    "Radeon-RX-6900-XTX-and-RTX-A5000-comparison.html; tensor cores four times float32"
)
_PRO_6000 = (
    "Workstation Edition, hmc-tech.com/gpu/nvidia-rtx-pro-6000-blackwell-vs-amd-radeon-pro-duo-polaris; float8 "
    "estimated as twice 16 bits"
)
_A2000 = (
    "float32 and bandwidth: cputronic.com/gpu/nvidia-rtx-a2000-12-gb; tensor cores four times that, as of the RTX A4000"
)
_AMD = "AMD data sheet, amd.com/en/products/accelerators/instinct/"
_20_SERIES = "scan.co.uk/tekspek/gpu-graphics/nvidia-geforce-rtx-3060ti"
_2060_SUPER = "techpowerup.com/review/nvidia-geforce-rtx-2060-super"
_2070 = "botcraftman.ru/de/gpu/geforce-gtx-1080-max-q-vs-geforce-rtx-2070"
_3060_8 = "fpsbench.com/compare/gpu/nvidia-geforce-rtx-3060-8-gb-vs-nvidia-geforce-rtx-4060-mobile"
_3090_TI = (
    "cpu-gpu.alldbin.com/graphics-card-comparison/GeForce-RTX-3090-Ti-and-GeForce-RTX-3060-12-GB-GA104-comparison.html"
)
_40_SERIES = "svethardware.cz/nvidia-geforce-rtx-4000-super-prichazi-vice-jader-vice-pameti-nebo-nizsi-cena/60300"
_60_CARDS = "gamingpcadvice.com/2025/06/08/the-rtx-5060-and-rtx-5060-ti-have-joined-the-pack"
_5060 = "diskmfr.com/rtx-5060-vs-5060-ti-16gb-worth-the-upgrade"
_50_SERIES = "tweaktown.com/news/102469"
_TENSOR_RATIO = {"Turing": 4.0, "Ampere": 2.0, "Ada": 2.0, "Blackwell": 2.0}
_3070 = f"{_OOM}akshitac8/OW-DETR/issues/46"
_3060 = f"{_OOM}Kunhao-Liu/StyleGaussian/issues/12"
_4060 = f"{_OOM}ESRSchao/EdgeRegNet/issues/2 (a laptop)"
_4060_TI = f"{_OOM}boson-ai/higgs-audio/issues/48"
_4070_TI = f"{_OOM}OpenLMLab/LOMO/issues/17"
_LIKE = "taken to be that of the {}: "
_LIKE_3070, _LIKE_3060 = _LIKE.format("RTX 3070") + _3070, _LIKE.format("RTX 3060") + _3060
_LIKE_4060, _LIKE_4060_TI = _LIKE.format("RTX 4060") + _4060, _LIKE.format("RTX 4060 Ti") + _4060_TI
_LIKE_4070_TI = _LIKE.format("RTX 4070 Ti") + _4070_TI

GPUS: dict[str, GpuSpec] = {
    "p100": _gpu("P100", "Pascal", 16, (6, 0), _SHEET.format(16), (None, 18.7, None, None, 9.3, 732),
                 "NVIDIA Tesla P100 PCIe data sheet (SXM2: 21.2 in float16)"),
    "t4": _gpu("T4", "Turing", 14.75, (7, 5), f"{_OOM}hpcaitech/Open-Sora/issues/697",
               (None, 65, None, None, 8.1, 320), f"{_NV}Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"),
    "v100-16": _gpu("V100 16 GB", "Volta", 16, (7, 0), _SHEET.format(16), (None, 125, None, None, 15.7, 900), _V100),
    "v100-32": _gpu("V100 32 GB", "Volta", 31.74, (7, 0), f"{_OOM}liucongg/ChatGLM-Finetuning/issues/73",
                    (None, 125, None, None, 15.7, 900), _V100),
    "rtx6000-turing": _gpu("Quadro RTX 6000 (Turing)", "Turing", 24, (7, 5), _SHEET.format(24),
                           (None, 130.5, None, None, 16.3, 672), "NVIDIA data sheet of Quadro RTX 6000 and 8000"),
    "rtx8000-turing": _gpu("Quadro RTX 8000 (Turing)", "Turing", 48, (7, 5), _SHEET.format(48),
                           (None, 130.5, None, None, 16.3, 672), "NVIDIA data sheet of Quadro RTX 6000 and 8000"),
    "rtx2060super": _geforce("RTX 2060 Super", "Turing", 7.78, (7, 5), _LIKE_3070, 2176, 1650, 448, _2060_SUPER),
    "rtx2070": _geforce("RTX 2070", "Turing", 7.78, (7, 5), _LIKE_3070, 2304, 1620, 448, _2070),
    "rtx2070super": _geforce("RTX 2070 Super", "Turing", 7.78, (7, 5), _LIKE_3070, 2560, 1770, 448, _20_SERIES),
    "rtx2080": _geforce("RTX 2080", "Turing", 7.78, (7, 5), _LIKE_3070, 2944, 1710, 448, _20_SERIES),
    "rtx2080super": _geforce("RTX 2080 Super", "Turing", 7.78, (7, 5), _LIKE_3070, 3072, 1815, 496, _20_SERIES),
    "rtx2080ti": _gpu("RTX 2080 Ti", "Turing", 10.76, (7, 5), f"{_OOM}JDAI-CV/image-captioning/issues/11",
                      (None, 53.8, None, None, 13.4, 616), f"{_TURING}, reference card"),
    "titan-rtx": _gpu("TITAN RTX", "Turing", 24, (7, 5), _SHEET.format(24), (None, 130.5, None, None, 16.3, 672),
                      _TURING),
    "rtx3060-8": _geforce("RTX 3060 8 GB", "Ampere", 7.78, (8, 6), _LIKE_3070, 3584, 1777, 240, _3060_8),
    "rtx3060-12": _geforce("RTX 3060 12 GB", "Ampere", 11.75, (8, 6), _3060, 3584, 1777, 360, _3090_TI),
    "rtx3060ti": _geforce("RTX 3060 Ti", "Ampere", 7.78, (8, 6), _LIKE_3070, 4864, 1665, 448, _20_SERIES),
    "rtx3070": _geforce("RTX 3070", "Ampere", 7.78, (8, 6), _3070, 5888, 1725, 448, _20_SERIES),
    "rtx3070ti": _geforce("RTX 3070 Ti", "Ampere", 7.78, (8, 6), _LIKE_3070, 6144, 1770, 608, None),
    "rtx3080-10": _geforce("RTX 3080 10 GB", "Ampere", 9.78, (8, 6), f"{_OOM}zai-org/CogVideo/issues/34",
                           8704, 1710, 760, _20_SERIES),
    "rtx3080-12": _geforce("RTX 3080 12 GB", "Ampere", 11.75, (8, 6), _LIKE_3060, 8960, 1710, 912, None),
    "rtx3080ti": _geforce("RTX 3080 Ti", "Ampere", 11.75, (8, 6), _LIKE_3060, 10240, 1665, 912, None),
    "rtx3090": _gpu("RTX 3090", "Ampere", 23.70, (8, 6), f"{_OOM}Lightning-AI/lit-llama/issues/137",
                    (71, 71, None, 35.6, 35.6, 936), _GA102),
    "rtx3090ti": _geforce("RTX 3090 Ti", "Ampere", 23.70, (8, 6),
                          f"{_LIKE.format('RTX 3090')}{_OOM}Lightning-AI/lit-llama/issues/137", 10752, 1860, 1008,
                          _3090_TI),
    "rtx4060": _geforce("RTX 4060", "Ada", 7.75, (8, 9), _4060, 3072, 2460, 272, _60_CARDS),
    "rtx4060ti-8": _geforce("RTX 4060 Ti 8 GB", "Ada", 7.75, (8, 9), _LIKE_4060, 4352, 2535, 288, _60_CARDS),
    "rtx4060ti-16": _geforce("RTX 4060 Ti 16 GB", "Ada", 15.55, (8, 9), _4060_TI, 4352, 2535, 288, _60_CARDS),
    "rtx4070": _geforce("RTX 4070", "Ada", 11.73, (8, 9), _LIKE_4070_TI, 5888, 2475, 504, _40_SERIES),
    "rtx4070super": _geforce("RTX 4070 Super", "Ada", 11.73, (8, 9), _LIKE_4070_TI, 7168, 2475, 504, _40_SERIES),
    "rtx4070ti": _geforce("RTX 4070 Ti", "Ada", 11.73, (8, 9), _4070_TI, 7680, 2610, 504, _40_SERIES),
    "rtx4070tisuper": _geforce("RTX 4070 Ti Super", "Ada", 15.55, (8, 9), _LIKE_4060_TI, 8448, 2610, 672, _40_SERIES),
    "rtx4080": _geforce("RTX 4080", "Ada", 15.55, (8, 9), _LIKE_4060_TI, 9728, 2505, 716.8, _40_SERIES),
    "rtx4080super": _geforce("RTX 4080 Super", "Ada", 15.55, (8, 9), _LIKE_4060_TI, 10240, 2550, 736, _40_SERIES),
    "rtx4090": _gpu("RTX 4090", "Ada", 23.65, (8, 9), f"{_OOM}tloen/llama-int8/issues/7",
                    (165.2, 165.2, 330.3, 82.6, 82.6, 1008), _ADA),
    "rtx5060": _geforce("RTX 5060", "Blackwell", 7.75, (12, 0), _LIKE_4060, 3840, 2497, 448, _5060),
    "rtx5060ti-8": _geforce("RTX 5060 Ti 8 GB", "Blackwell", 7.75, (12, 0), _LIKE_4060, 4608, 2572, 448, _5060),
    "rtx5060ti-16": _geforce("RTX 5060 Ti 16 GB", "Blackwell", 15.55, (12, 0), _LIKE_4060_TI, 4608, 2572, 448, _5060),
    "rtx5070": _geforce("RTX 5070", "Blackwell", 11.73, (12, 0), _LIKE_4070_TI, 6144, 2512, 672, _50_SERIES),
    "rtx5070ti": _geforce("RTX 5070 Ti", "Blackwell", 15.55, (12, 0), _LIKE_4060_TI, 8960, 2452, 896, _50_SERIES),
    "rtx5080": _geforce("RTX 5080", "Blackwell", 15.55, (12, 0), _LIKE_4060_TI, 10752, 2617, 960, _50_SERIES),
    "rtx5090": _gpu("RTX 5090", "Blackwell", 31.36, (12, 0), f"{_OOM}TrajectoryCrafter/TrajectoryCrafter/issues/20",
                    (209.5, 209.5, 419, 104.8, 104.8, 1792), "NVIDIA RTX Blackwell GPU architecture white paper"),
    "rtx-a2000-6": _gpu("RTX A2000 6 GB", "Ampere", _mib(5754), (8, 6),
                        "nvidia-smi total with ECC (5,754 MiB), an upper bound", (31.9, 31.9, None, None, 8.0, 288),
                        _A2000),
    "rtx-a2000-12": _gpu("RTX A2000 12 GB", "Ampere", 11.75, (8, 6), _LIKE_3060, (31.9, 31.9, None, None, 8.0, 288),
                         _A2000),
    "rtx-a4000": _gpu("RTX A4000", "Ampere", 15.61, (8, 6), f"{_OOM}DengKaiCQ/VGGT-Long/issues/6",
                      (76.7, 76.7, None, None, 19.2, 448),
                      "NVIDIA data sheet: 153.4 with sparsity, as in ecer.com's copy of it"),
    "rtx-a4500": _gpu("RTX A4500", "Ampere", 20, (8, 6), _SHEET.format(20), (94.6, 94.6, None, None, 23.7, 640),
                      "technical.city/fr/video/RTX-A4000-vs-RTX-A4500; tensor cores four times float32"),
    "rtx-a5000": _gpu("RTX A5000", "Ampere", _mib(24564), (8, 6), "nvidia-smi total (24,564 MiB), an upper bound",
                      (111.1, 111.1, None, None, 27.8, 768), _A5000),
    "rtx-a6000": _gpu("RTX A6000", "Ampere", _mib(49140), (8, 6), "nvidia-smi total (49,140 MiB), an upper bound",
                      (154.8, 154.8, None, 77.4, 38.7, 768), f"{_GA102}, appendix C"),
    "rtx6000-ada": _gpu("RTX 6000 Ada", "Ada", 44.43, (8, 9), f"{_OOM}DINGYANB/MTVCrafter/issues/21, with ECC on",
                        (364.2, 364.2, 728.5, 182.1, 91.1, 960), "NVIDIA data sheet: 1,457 in fp8 with sparsity"),
    "rtx-pro-6000": _gpu("RTX PRO 6000 Blackwell", "Blackwell", 94.97, (12, 0),
                         "device total, github.com/antirez/ds4/issues/431",
                         (503.8, 503.8, 1007.6, 251.9, 125.9, 1792), _PRO_6000),
    "a10": _gpu("A10", "Ampere", _mib(23028), (8, 6), _SMI, (125, 125, None, 62.5, 31.2, 600),
                f"{_NV}Data-Center/a10/pdf/a10-datasheet.pdf"),
    "a10g": _gpu("A10G", "Ampere", _mib(23028), (8, 6), f"as for the A10: {_SMI}", (70, 70, None, 35, 35, 600),
                 "NVIDIA data sheet, as in baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference"),
    "a30": _gpu("A30", "Ampere", 23.53, (8, 0), f"{_OOM}google/RB-Modulation/issues/5",
                (165, 165, None, 82, 10.3, 933), "NVIDIA A30 data sheet"),
    "a40": _gpu("A40", "Ampere", _mib(46068), (8, 6), "nvidia-smi total, an upper bound, "
                "github.com/sgl-project/sglang/issues/1522", (149.7, 149.7, None, 74.8, 37.4, 696),
                "NVIDIA A40 data sheet"),
    "l4": _gpu("L4", "Ada", _mib(23034), (8, 9), _SMI, (121, 121, 242, 60, 30.3, 300), "NVIDIA L4 data sheet, halved"),
    "l40": _gpu("L40", "Ada", 48, (8, 9), _SHEET.format(48), (181, 181, 362, 90.5, 90.5, 864), "NVIDIA L40 data sheet"),
    "l40s": _gpu("L40S", "Ada", 44.53, (8, 9), f"{_OOM}Wan-Video/Wan2.1/issues/205",
                 (362, 362, 733, 183, 91.6, 864), "NVIDIA data sheet, resources.nvidia.com/en-us-l40s"),
    "a100-40": _gpu("A100 40 GB", "Ampere", 39.50, (8, 0), f"{_OOM}TianheWu/CoSeR/issues/10",
                    (312, 312, None, 156, 19.5, 1555), _A100),
    "a100-80": _gpu("A100 80 GB", "Ampere", 79.25, (8, 0), f"{_OOM}HiDream-ai/VAREdit/issues/6",
                    (312, 312, None, 156, 19.5, 2039), f"{_A100}, SXM4 (PCIe: 1,935 GB/s)"),
    "h100": _gpu("H100 80 GB", "Hopper", 79.11, (9, 0), f"{_OOM}vllm-project/vllm/issues/27508",
                 (989, 989, 1979, 495, 67, 3350), f"{_H100}, SXM5"),
    "h100-pcie": _gpu("H100 PCIe", "Hopper", 80, (9, 0), _SHEET.format(80),
                      (756, 756, 1513, 378, 51, 2000), f"{_H100}, PCIe"),
    "h100-nvl": _gpu("H100 NVL", "Hopper", 93.00, (9, 0), f"{_OOM}ali-vilab/VACE/issues/56",
                     (835, 835, 1671, 418, 60, 3900), f"{_H100}, NVL"),
    "h200": _gpu("H200", "Hopper", _mib(143771), (9, 0), "nvidia-smi total (143,771 MiB), an upper bound",
                 (989, 989, 1979, 495, 67, 4800), "NVIDIA data sheet, nvidia.com/en-us/data-center/h200, halved"),
    "h200-nvl": _gpu("H200 NVL", "Hopper", _mib(143771), (9, 0), "nvidia-smi total (143,771 MiB), an upper bound",
                     (835, 835, 1671, 418, 60, 4800), "estimated: rates of the H100 NVL, bandwidth of the H200"),
    "gh200": _gpu("GH200 96 GB", "Hopper", 96, (9, 0), _SHEET.format(96),
                  (989, 989, 1979, 495, 67, 4000), "NVIDIA Grace Hopper data sheet, halved"),
    "b200": _gpu("B200", "Blackwell", 178.35, (10, 0), "device query, github.com/pytorch/ao/pull/4002",
                 (2250, 2250, 4500, 1100, 75, 7700), _HGX),
    "b300": _gpu("B300", "Blackwell", _mib(275040), (10, 3), "nvidia-smi total (275,040 MiB of 288 GB), an upper bound",
                 (2250, 2250, 4500, 1100, 75, 8000), _HGX),
    "mi210": _gpu("MI210", "CDNA 2", 64, None, _SHEET.format(64), (181, 181, None, None, 45.3, 1600), f"{_AMD}mi200"),
    "mi250": _gpu("MI250, one of its two dies", "CDNA 2", 64, None, _SHEET.format("128/2"),
                  (181, 181, None, None, 45.3, 1600), f"{_AMD}mi200, halved: PyTorch sees two GPUs"),
    "mi250x": _gpu("MI250X, one of its two dies", "CDNA 2", 64, None, _SHEET.format("128/2"),
                   (191.5, 191.5, None, None, 47.9, 1600), f"{_AMD}mi200/mi250x.html, halved: PyTorch sees two GPUs"),
    "mi300x": _gpu("MI300X", "CDNA 3", 201310208 / 1024**2, None, "rocminfo, github.com/ROCm/rocm-examples/issues/187",
                   (1307.4, 1307.4, 2614.9, 653.7, 163.4, 5300), f"{_AMD}mi300/mi300x.html"),
    "mi325x": _gpu("MI325X", "CDNA 3", 256, None, _SHEET.format(256),
                   (1307.4, 1307.4, 2614.9, 653.7, 163.4, 6000), f"{_AMD}mi300/mi325x.html"),
}  # fmt: skip
_ALIASES = {
    "p10016gb": "p100", "v100": "v100-16", "v10016gb": "v100-16", "v10032gb": "v100-32",
    "quadrortx6000": "rtx6000-turing", "quadrortx8000": "rtx8000-turing", "rtx8000": "rtx8000-turing",
    "rtx3060": "rtx3060-8", "rtx3080": "rtx3080-10", "rtx4060ti": "rtx4060ti-8", "rtx5060ti": "rtx5060ti-8",
    "a2000": "rtx-a2000-6", "rtxa2000": "rtx-a2000-6", "a200012gb": "rtx-a2000-12", "a200012": "rtx-a2000-12",
    "a20006gb": "rtx-a2000-6", "a20006": "rtx-a2000-6", "a4000": "rtx-a4000", "a4500": "rtx-a4500",
    "a5000": "rtx-a5000", "a6000": "rtx-a6000", "6000ada": "rtx6000-ada", "rtx6000adageneration": "rtx6000-ada",
    "rtxpro6000blackwell": "rtx-pro-6000", "rtxpro6000blackwellserveredition": "rtx-pro-6000",
    "rtxpro6000blackwellworkstationedition": "rtx-pro-6000", "a10040gb": "a100-40", "a100": "a100-80",
    "a10080gb": "a100-80", "h10080gb": "h100", "h10080gbhbm2e": "h100-pcie", "gh20096gb": "gh200",
    "gh200480gb": "gh200", "h200141gb": "h200", "b300sxm6ac": "b300",
}  # fmt: skip

_SIZES = {
    "a100": ("a100-40", "a100-80"), "v100": ("v100-16", "v100-32"), "rtx3060": ("rtx3060-8", "rtx3060-12"),
    "rtx3080": ("rtx3080-10", "rtx3080-12"), "rtx4060ti": ("rtx4060ti-8", "rtx4060ti-16"),
    "rtx5060ti": ("rtx5060ti-8", "rtx5060ti-16"), "rtxa2000": ("rtx-a2000-6", "rtx-a2000-12"),
    "a2000": ("rtx-a2000-6", "rtx-a2000-12"),
}  # fmt: skip
"""Cards that exist with different amounts of memory under one name, the smallest first."""


def _plain(name: str) -> str:
    """Return a name without vendor, form factor and punctuation; a GeForce card's begins with rtx.

    >>> _plain("NVIDIA GeForce RTX 3060 Ti"), _plain("4060 Ti 16GB"), _plain("NVIDIA A100-SXM4-80GB")
    ('rtx3060ti', 'rtx4060ti16gb', 'a100sxm480gb')
    """
    plain = re.sub(r"nvidia|geforce|tesla|amd|instinct|[^a-z0-9]", "", name.lower())
    return f"rtx{plain}" if re.match(r"[2345]0[5-9]0(?!0)", plain) else plain


_NAMES = {_plain(spelling): key for key, gpu in GPUS.items() for spelling in (key, gpu.name)} | _ALIASES
_NAMES |= {f"{plain}gb": key for plain, key in _NAMES.items() if re.search(r"-\d+$", key) and plain == _plain(key)}


def spellings() -> list[str]:
    """Return the accepted names of GPUs: the catalogue's names, and short ones, such as 4090."""
    return [*GPUS, *_NAMES, *(name.removeprefix("rtx") for name in _NAMES if name.startswith("rtx"))]


def find_gpu(name: str, memory_bytes: int | None = None) -> GpuSpec | None:
    """Find a GPU in the catalogue, however its name is written: h100, RTX_3090, 4090, "NVIDIA A100-SXM4-80GB".

    Args:
        memory_bytes: its memory, which tells cards with the same name apart; without it the smaller one is taken.
    """
    if memory_bytes and (sizes := sizes_of(name)):
        return min((GPUS[key] for key in sizes), key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
    plain = _plain(name)
    # The form factor is ignored unless it has an entry of its own, as the H100's have.
    key = _NAMES.get(plain) or _NAMES.get(re.sub(r"pcie|sxm\d?|hbm\de?", "", plain))
    return GPUS[key] if key else None


SEEN_SHARE = 0.92
"""Share of a card's advertised memory that is counted where only the size is given. No card above of that size shows
less to PyTorch: cards with ECC show 92.2 % (T4) to 93.8 % (A10, L4), consumer cards up to 98.5 %."""
LEAST_GB, MOST_GB = 1, 1024
"""Sizes in GB that a card may have."""
GENERIC = "none: only the size of the card is given"
_GB = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])i?b|(g))", re.IGNORECASE)
"""A size with its unit: GB, GiB or G; not 4060 Ti."""


def generic_gpu(text: str) -> GpuSpec | None:
    """Return a card of which only the memory is given, such as 12GB; None where the text is no size.

    Its features are those of Ampere's consumer cards, the first with bfloat16. Its speed is unknown. GB and GiB are the
    same here, as on a card's box.

    Raises:
        ConfigError: no card has that much, or that little.
    """
    match = _GB.fullmatch(text.strip())
    if match is None:
        return None
    size = float(match[1]) * 1024.0 ** ("kmgt".index((match[2] or match[3]).lower()) - 2)
    if not LEAST_GB <= size <= MOST_GB:
        raise ConfigError(
            f"no GPU has {text.strip()} of memory",
            code="E2104",
            field="hardware.gpu",
            help=f"write the size in GB, {LEAST_GB}GB to {MOST_GB}GB, such as 12GB, or a card's name, such as 4070",
        )
    source = (
        f"{SEEN_SHARE:.0%} of {size:g} GB: what PyTorch sees of the card of this size that shows least, one with ECC"
    )
    memory = round(SEEN_SHARE * size * GIB)
    article = "an" if f"{size:g}".startswith("8") or size in (11, 18) else "a"
    rates: GpuRates = (None, None, None, None, None, None)
    return _gpu(f"{article} {size:g} GB card", "Ampere", memory / GIB, (8, 6), source, rates, GENERIC)


def sizes_of(name: str) -> tuple[str, ...]:
    """Return the cards that a name without an amount of memory may mean; () where it means one.

    >>> sizes_of("A100 PCIe"), sizes_of("3080"), sizes_of("NVIDIA A100-SXM4-80GB")
    (('a100-40', 'a100-80'), ('rtx3080-10', 'rtx3080-12'), ())
    """
    return _SIZES.get(re.sub(r"pcie|sxm\d?|hbm\de?", "", _plain(name)), ())
