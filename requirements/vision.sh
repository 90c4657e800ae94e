#!/usr/bin/env bash
# Installs torchvision, which models with images need, next to a CPU build of PyTorch: requirements/vision.sh [PYTHON]
# install.sh calls it. Exits with 1 if torchvision is not available; text works without it.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
version=$(sed -n 's/^torchvision==\([^ ;]*\).*/\1/p' requirements/cpu.lock)
pip() { "$python" -m pip --disable-pip-version-check --quiet --retries 1 --timeout 20 "$@" 2>/dev/null; }
works() { "$python" -c 'import torchvision' 2>/dev/null; }

works && exit 0
# Reinstall, because pip takes the stand-in for this version. PyTorch's index has the CPU build, other indexes only CUDA's.
if ! pip install --force-reinstall --no-deps "torchvision==$version+cpu" &&
  ! pip install --force-reinstall --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "torchvision==$version+cpu"; then
  pip install --force-reinstall --no-deps "torchvision==$version"
fi
# The compiled part of the CUDA build does not load next to a CPU build of PyTorch. Its Python code needs that part only to
# declare two operators, which no image processor calls. Write a new file: the old one may be a hard link into uv's cache.
works || "$python" - <<'PYTHON'
import importlib.util
import os
from pathlib import Path

package = importlib.util.find_spec("torchvision")
if package is not None and package.origin is not None:
    file = Path(package.origin)
    declared = '''import torch as _torch

_library = _torch.library.Library("torchvision", "DEF")
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
'''
    new = file.with_suffix(".new")
    new.write_text(declared + file.read_text())
    os.replace(new, file)
PYTHON
works && exit 0
pip install --no-deps --no-build-isolation requirements/absent/torchvision
echo "not installed: torchvision $version, for models with images: no index that pip asks has a build that works" >&2
exit 1
