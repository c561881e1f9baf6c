# Libraries that are part of every system and tied to its kernel or compiler: what is bundled leaves them out.
set(system_libraries "ld-linux.*" "libc\\.so.*" "libm\\.so.*" "libdl\\.so.*" "librt\\.so.*" "libpthread\\.so.*"
  "libgcc_s\\.so.*" "libstdc\\+\\+\\.so.*" "libcuda\\.so.*")
