"""The file in which an engine publishes its load has the name prefix of its stage."""

TARGET = "sglang.srt.managers.load_snapshot.shm_path_for"
KIND = "replace"
SIGNATURE = "(ipc_name: 'str') -> 'str'"
WHY = "each start of an engine leaves a file in shared memory that cannot safely be removed"
DROP_WHEN = "the name of SGLang's file shows its owner, or its processes are not killed"
STAGES = ("thinker", "talker", "piece_talker")
CPU_ONLY = False
HOOK = "sglang_live.bridge.platform.load_file:path_for"
