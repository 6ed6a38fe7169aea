"""The list of all measurements: the command of each, the data it needs, and its seconds on a GPU."""

from dataclasses import dataclass

TORCHRUN = "torchrun --standalone --nproc-per-node"
WILL_IT_FIT = "python experiments/will_it_fit.py"
SLOW_NETWORK = (
    "--name slow_network --model gpt_7b --ranks 64,8x8 --ways blocks --checkpointing false --batch_size 8 "
    "--accumulate 8 --adapters 1 --adapter_gb_per_second 25"
)
DEEPER = "--model gpt_70b --ranks 64 --ways blocks --checkpointing true"
MNIST, CIFAR = ("mnist --synthetic --shards",), ("cifar10 --synthetic --shards",)
BOXES = ("nbody --synthetic --cells 64",)
LARGE_BOXES = ("nbody --synthetic --cells 128",)
TEXT = ("text",)
TINY_DATA = {
    "mnist": "mnist --synthetic --shards --train_samples 640 --val_samples 128",
    "cifar10": "cifar10 --synthetic --shards --train_samples 640 --val_samples 128",
    "nbody": "nbody --synthetic --cells 32",
    "text": "text",
}


@dataclass(frozen=True)
class Measurement:
    """A command that measures something and stores it."""

    name: str
    command: str
    """as it is typed in the folder of its lesson; {folder} is the folder of the machine, {null_half} a file"""
    lesson: str
    data: tuple[str, ...] = ()
    """what `data/prepare.py` is called with before"""
    gpus: int = 0
    """that it needs; with 0 it sees none"""
    seconds: float = 0
    """that it takes on a GPU, estimated"""
    measured: str = ""
    """what of it an H200 took, where it was measured"""
    parts: bool = True
    """whether it stores each part at once and, when it is called again, does the other parts only"""
    at_most: float = 0
    """seconds after which it is cut; 0: a minute, or twice what it takes"""
    tiny: str = ""
    """more words for --tiny true"""
    not_on_null: str = ""
    """why null GPUs cannot run it"""

    @property
    def limit(self) -> float:
        """Seconds after which it is cut."""
        return self.at_most or max(60.0, 2 * self.seconds)

    @property
    def expected(self) -> str:
        """Its seconds, and what is known of them."""
        known = f"; an H200: {self.measured}" if self.measured else ""
        return f"{self.seconds:.0f} s estimated{known}"


ONE, TWO, THREE = "01_single_gpu", "02_dataparallel", "03_ddp"
FOUR, FIVE = "04_mixed_precision", "05_fully_sharded"
MNIST_LADDER = "--name precision_ladder_mnist --config ../configs/mnist.yaml --loader device --limit_train 59968"
SMALL_UNET = (
    "--config ../configs/unet3d.yaml --config ../configs/unet3d_tiny.yaml "
    "--unet_width 4 --crop_size 8 --train_crops 32 --val_crops 4 --global_batch_size 4"
)
SHORT_LADDER = "--configurations fp32,bf16 --seconds 0.01"
GPU = (
    Measurement(
        "tests",
        "python lab/gpu_tests.py --folder {folder}",
        ".",
        gpus=1,
        seconds=200,
        measured="165 s for 51 of the tests, 8 at a time, beside other runs",
        tiny="--only overflows_leaves",
    ),
    Measurement(
        "lessons_beside_null_gpus",
        "python lab/studies/gpu_cases.py gpu --folder {folder} --null_half {null_half}",
        ".",
        gpus=1,
        seconds=100,
        measured="less than 135 s for 16 cases, 4 at a time",
        tiny="--only '04, short'",
    ),
    Measurement(
        "operations",
        "python lab/studies/gpu_operations.py --folder {folder}",
        ".",
        gpus=1,
        seconds=40,
        measured="24 s for 363 of the operations",
        tiny="--tiny true",
    ),
    Measurement(
        "trainings",
        "python lab/studies/gpu_trainings.py --folder {folder}",
        ".",
        gpus=1,
        seconds=90,
        measured="100 s for 30, without the start",
        tiny="--tiny true",
    ),
    Measurement(
        "large_lessons_beside_null_gpus",
        "python lab/studies/gpu_cases.py gpu --large true --folder {folder} --null_half {null_half}",
        ".",
        CIFAR + LARGE_BOXES + TEXT,
        1,
        90,
        tiny="--only none",
    ),
)
"""what a GPU says beside the tables of the pages, in the order of its importance"""
TABLES = (
    Measurement(
        "unet3d_throughput",
        "python experiments/unet3d_throughput.py",
        FOUR,
        LARGE_BOXES,
        1,
        70,
        measured="75 s a row when each row was a process of its own",
        tiny="--tiny true --seconds 0.01",
    ),
    Measurement(
        "loader_overlap",
        "python experiments/loader_overlap.py --rounds 1 --benchmark_seconds 0.3",
        FOUR,
        LARGE_BOXES,
        1,
        90,
        measured="more than 103 s when each way was a process of its own",
        parts=False,
        tiny=f"--benchmark_seconds 0.01 {SMALL_UNET}",
    ),
    Measurement(
        "precision_ladder",
        "python experiments/ladder.py --seconds 0.3",
        FOUR,
        LARGE_BOXES,
        1,
        200,
        tiny=f"{SHORT_LADDER} {SMALL_UNET}",
    ),
    Measurement(
        "loaders",
        "python experiments/throughput.py loaders --rounds 1 --seconds 0.3",
        ONE,
        CIFAR,
        1,
        100,
        tiny="--seconds 0.01 --batch_size 16 --num_workers 0",
    ),
    Measurement(
        "sharded_throughput",
        "python experiments/sharded_throughput.py --seconds 0.3",
        FIVE,
        gpus=1,
        seconds=90,
        tiny="--tiny true --seconds 0.01",
    ),
    Measurement(
        "mnist_loaders",
        "python experiments/throughput.py mnist_loaders --rounds 1 --seconds 0.3",
        ONE,
        MNIST,
        1,
        90,
        tiny="--seconds 0.01 --batch_size 16 --num_workers 0",
    ),
    Measurement(
        "bandwidth",
        "python experiments/bandwidth.py --quick true",
        ONE,
        gpus=1,
        seconds=30,
        parts=False,
    ),
    Measurement(
        "precision_ladder_mnist",
        f"python experiments/ladder.py --seconds 0.3 {MNIST_LADDER}",
        FOUR,
        MNIST,
        1,
        120,
        tiny=f"{SHORT_LADDER} --limit_train 64 --batch_size 8",
    ),
    Measurement(
        "format_errors",
        "python experiments/format_errors.py",
        FOUR,
        LARGE_BOXES,
        1,
        30,
        parts=False,
        tiny=f"--limit_val 2 {SMALL_UNET}",
    ),
    Measurement(
        "underflow",
        "python experiments/underflow.py --steps 30",
        FOUR,
        LARGE_BOXES,
        1,
        60,
        parts=False,
        tiny=f"--steps 2 {SMALL_UNET}",
    ),
    Measurement(
        "tensor_cores",
        "python experiments/tensor_cores.py",
        FOUR,
        gpus=1,
        seconds=30,
        parts=False,
        not_on_null="with values, its products take many minutes of a CPU",
    ),
    Measurement(
        "cpu_or_gpu",
        "python experiments/cpu_or_gpu.py --quick true",
        ONE,
        gpus=1,
        seconds=60,
        parts=False,
        tiny="--problem line",
    ),
    Measurement(
        "compare",
        "python experiments/compare.py",
        TWO,
        CIFAR,
        2,
        90,
        parts=False,
        tiny="--rounds 1 --benchmark_seconds 0.01",
    ),
    Measurement(
        "nccl_backends",
        "python experiments/nccl_backends.py",
        THREE,
        CIFAR,
        2,
        60,
        parts=False,
        not_on_null="its traces need kernels",
    ),
    Measurement(
        "allreduce",
        f"{TORCHRUN} gpu experiments/allreduce.py --max_mib 512",
        THREE,
        gpus=2,
        seconds=30,
        parts=False,
        tiny="--max_mib 1 --seconds 0.01",
    ),
    Measurement(
        "scaling",
        "python experiments/scaling.py",
        THREE,
        CIFAR,
        2,
        180,
        parts=False,
        tiny="--rounds 1 --batch_size 16 --benchmark_seconds 0.01",
    ),
)
"""the tables of the pages, in the order of their importance"""
CPU = (
    Measurement("loaders", "python experiments/throughput.py loaders --seconds 3", ONE, CIFAR),
    Measurement("worker_counts", "python experiments/throughput.py worker_counts", ONE, MNIST),
    Measurement("models", "python experiments/throughput.py models", ONE, CIFAR),
    Measurement("first_changes", "python experiments/first_changes.py", ONE, MNIST + CIFAR),
    Measurement("loading_timelines", "python experiments/loading_timelines.py", ONE, MNIST),
    Measurement("sequential_reads", "python experiments/sequential_reads.py", ONE, MNIST),
    Measurement("bandwidth", "python experiments/bandwidth.py", ONE),
    Measurement("cpu_or_gpu", "python experiments/cpu_or_gpu.py", ONE),
    Measurement("simulated_gpu", "python experiments/simulated_gpu.py", ONE, CIFAR),
    Measurement("compare", "python experiments/compare.py", TWO, MNIST),
    Measurement("scaling", "python experiments/scaling.py", THREE, MNIST),
    Measurement("allreduce", f"{TORCHRUN} 2 experiments/allreduce.py --seconds 1", THREE),
    Measurement("ddp_options", "python experiments/ddp_options.py", THREE, CIFAR),
    Measurement("ddp_step", "python experiments/ddp_step.py", THREE, CIFAR),
    Measurement("bucket_timelines", "python experiments/bucket_timelines.py", THREE, CIFAR),
    Measurement("batches", "python experiments/large_batches.py batches", THREE, CIFAR),
    Measurement("higher_rate", "python experiments/large_batches.py higher_rate", THREE, CIFAR),
    Measurement("simulated_scaling", "python experiments/simulated_scaling.py", THREE, CIFAR),
    Measurement("unet3d", "python experiments/unet3d.py", FOUR, BOXES),
    Measurement("precision_ladder", "python experiments/ladder.py --rounds 5", FOUR, BOXES),
    Measurement("underflow", "python experiments/underflow.py", FOUR, BOXES),
    Measurement("format_errors", "python experiments/format_errors.py", FOUR, BOXES),
    Measurement("tensor_cores", "python experiments/tensor_cores.py", FOUR),
    Measurement("loader_overlap", "python experiments/loader_overlap.py --simulated h200", FOUR, LARGE_BOXES),
    Measurement("simulated_gains", "python experiments/simulated_gains.py", FOUR, LARGE_BOXES + MNIST),
    Measurement("success_rate", "python experiments/success_rate.py", FOUR, MNIST),
    Measurement("same_losses", "python experiments/same_losses.py", FIVE),
    Measurement("save_and_reshard", "python experiments/save_and_reshard.py", FIVE, TEXT),
    Measurement("one_step", f"{TORCHRUN} 2 experiments/one_step.py", FIVE),
    Measurement("accumulation", f"{TORCHRUN} 2 experiments/accumulation.py", FIVE),
    Measurement("ddp_or_blocks", "python experiments/ddp_or_blocks.py", FIVE, TEXT),
    Measurement("small_updates", f"{TORCHRUN} 2 experiments/small_updates.py", FIVE),
    Measurement("recompute", "python experiments/recompute.py", FIVE),
    Measurement("what_fills_memory", "python experiments/what_fills_memory.py", FIVE),
    Measurement("will_it_fit_check", f"{WILL_IT_FIT} --check true", FIVE),
    Measurement("published_forecast", f"{WILL_IT_FIT} --published true", FIVE),
    Measurement("will_it_fit_gpt_7b", f"{WILL_IT_FIT} --model gpt_7b --ranks 8,64,1024,8x8 --ways ddp,blocks", FIVE),
    Measurement("will_it_fit_slow_network", f"{WILL_IT_FIT} {SLOW_NETWORK}", FIVE),
    Measurement("will_it_fit_gpt_70b", f"{WILL_IT_FIT} {DEEPER}", FIVE),
    Measurement("checkpoint_cost", "python experiments/checkpoint_cost.py", FIVE),
    Measurement("tensor_parallel_2_ranks", f"{TORCHRUN} 2 experiments/tensor_parallel.py", FIVE),
    Measurement("tensor_parallel_4_ranks", f"{TORCHRUN} 4 experiments/tensor_parallel.py", FIVE),
)
