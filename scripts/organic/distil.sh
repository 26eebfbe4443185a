#!/usr/bin/env bash
# Labels and training of distil.yaml on one host, as in docs/dev/organic.md ("Eighth call" to "Tenth call"). Run in an
# empty folder:
#
#     bash scripts/organic/distil.sh GEOMETRIES torsions.npz m0.tmn,m1.tmn,m2.tmn,m3.tmn
#
# GEOMETRIES is the folder of geometries.py, and the models are the teacher. Water, clusters and separated ions are
# labelled by `organic` itself, so that they stay as they are. GPUS=2: how many; PER_GPU=6: processes that label on
# each, of which one takes up to 15 GB; FRAMES=1: of dynamics from each geometry, one every EVERY=20 fs, with the
# potential DRIVER=organic; LABEL_MINUTES=3; MINUTES=20, of the training and its preparation; DEVICE=cpu GPUS=1 for a
# trial; PYTHON=python. What follows the models is for `torchmdnet2 train`, for example --set init.file=/…/r12.tmn. With
# several GPUs each takes a part of every batch: set training.batch_size to 192 for each of them.
set -euo pipefail
geometries=$(realpath "$1") scans=$(realpath "$2") teacher=$3
here=$(dirname "$(realpath "$0")") gpus=${GPUS:-2} device=${DEVICE:-cuda} python=${PYTHON:-python}
processes=$((gpus * ${PER_GPU:-6})) minutes=${LABEL_MINUTES:-3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
finished() { # wait for all processes that were started
    for pid in "${pids[@]}"; do wait "$pid" || { echo "a process failed, see logs/" >&2; exit 1; }; done
    pids=()
}
pids=()
mkdir -p work/all work/taught work/kept work/labels logs

shopt -s nullglob
ln -sf "$geometries"/{train,validation}-*.npz work/all/
"$python" "$here/distil.py" ions work/all > logs/ions.log 2>&1
k=0 cores=$(env -u OMP_NUM_THREADS nproc)
for path in work/all/*-conformers-*.npz; do # links, so that all cores turn bonds
    mkdir -p work/part$((k % cores))
    cp -P "$path" work/part$((k++ % cores))/
done
for part in work/part*; do
    "$python" "$here/distil.py" turned "$part" > "logs/turned-$(basename "$part").log" 2>&1 & pids+=($!)
done
"$python" "$here/distil.py" apart work/all > logs/apart.log 2>&1 & pids+=($!)
finished
turned=(work/part*/*-turned-*.npz)
if ((${#turned[@]})); then mv "${turned[@]}" work/all/; fi
for path in work/all/*.npz; do
    case $path in *-water-* | *-clusters-* | *-separated-*) mv "$path" work/kept/ ;; *) mv "$path" work/taught/ ;; esac
done

options=(--student "${DRIVER:-organic}" --keep 1 --frames "${FRAMES:-1}" --every $((2 * ${EVERY:-20})) --timestep 1
    --temperatures 100 300 600 --device "$device" --batch "${BATCH:-256}" --minutes "$minutes")
for ((k = 0; k < processes; k++)); do
    CUDA_VISIBLE_DEVICES=$((k % gpus)) "$python" "$here/label.py" work/taught work/taught/labels --model "$teacher" \
        "${options[@]}" --largest-spread 3 --part $k/$processes > logs/label$k.log 2>&1 & pids+=($!)
done
"$python" "$here/label.py" work/kept work/kept/labels --model organic "${options[@]}" > logs/kept.log 2>&1 & pids+=($!)
CUDA_VISIBLE_DEVICES=$((gpus - 1)) "$python" "$here/distil.py" scans "$scans" work/scans --model "$teacher" --start organic \
    --device "$device" > logs/scans.log 2>&1 & pids+=($!)
finished
for ((k = 0; k < processes; k++)); do # few large files, which the training opens faster
    "$python" "$here/merge.py" work/taught/labels work/labels --part $k/$processes > logs/merge$k.log 2>&1 & pids+=($!)
done
"$python" "$here/merge.py" work/kept/labels work/kept-labels > logs/merge-kept.log 2>&1 & pids+=($!)
finished
tail -qn 1 logs/label*.log logs/kept.log logs/scans.log

start=("$python")
if ((gpus > 1)); then start+=(-m torch.distributed.run --nproc-per-node "$gpus"); fi
"${start[@]}" -m torchmdnet2 train "$here/distil.yaml" --set "training.max_minutes=${MINUTES:-20}" "${@:4}"
