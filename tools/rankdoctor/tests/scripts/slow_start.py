"""Never makes an update."""

import time

import torch.distributed as dist

dist.init_process_group("gloo")


def download() -> None:
    time.sleep(1000)  # LINE download


download()
