"""Say why a run stands still: `torchtitan doctor DIR`.

DIR is what the ranks wrote when nothing moved, when one raised an exception, or on SIGUSR2
(`<job.dump_folder>/<comm.save_traces_folder>`), or the dump folder around it.
"""

import argparse
from pathlib import Path

from torchtitan.config.schema import Comm
from torchtitan.observe.diagnosis import diagnose
from torchtitan.observe.evidence import read_case
from torchtitan.utils.errors import UserError


def main(argv: list[str]) -> int:
    comm = Comm()
    parser = argparse.ArgumentParser(prog="torchtitan doctor", description=__doc__)
    parser.add_argument("folder", type=Path, help="what the ranks wrote, or the run's dump folder")
    parser.add_argument("--prefix", default=comm.save_traces_file_prefix, help="comm.save_traces_file_prefix of it")
    options = parser.parse_args(argv)
    for folder in (options.folder, options.folder / comm.save_traces_folder):
        if folder.is_dir() and (case := read_case(folder, options.prefix)):
            print(diagnose(case))
            for rank, witness in sorted(case.witnesses.items()):
                print(f"  rank {rank}: {witness.doing()}")
            for rank, text in sorted(case.silent.items()):
                print(f"  rank {rank}: {text}")
            return 0
    raise UserError(
        f"{options.folder}: no rank has written anything here. A run writes into comm.save_traces_folder of its "
        "job.dump_folder when it hangs or fails, or when one of its ranks gets SIGUSR2."
    )
