// Sequences that leave an engine and come back.
#include <string_view>

#include "capi/engine.hpp"

using namespace sluice;

namespace {

std::string_view text_of(const char* model) { return model == nullptr ? std::string_view() : std::string_view(model); }

}  // namespace

sluice_status sluice_engine_park_bytes(const sluice_engine* engine, sluice_sequence sequence, const char* model,
                                       uint64_t* bytes) {
  return capi::guarded([&] {
    const Engine& of = capi::engine_of(engine);
    capi::require_pointer(bytes, "bytes");
    *bytes = of.park_bytes(SequenceId{sequence}, text_of(model));
  });
}

sluice_status sluice_engine_park_memory(const sluice_engine* engine, sluice_sequence sequence, const char* model,
                                        void* area, uint64_t area_bytes, uint64_t* bytes) {
  return capi::guarded([&] {
    const Engine& of = capi::engine_of(engine);
    capi::require_pointer(area, "area");
    const std::uint64_t written =
        of.park(SequenceId{sequence}, std::span(static_cast<std::byte*>(area), area_bytes), text_of(model));
    if (bytes != nullptr) *bytes = written;
  });
}

sluice_status sluice_engine_park_file(const sluice_engine* engine, sluice_sequence sequence, const char* model,
                                      const char* path) {
  return capi::guarded([&] {
    const Engine& of = capi::engine_of(engine);
    capi::require_pointer(path, "path");
    of.park(SequenceId{sequence}, path, text_of(model));
  });
}

sluice_status sluice_engine_resume_memory(sluice_engine* engine, const void* area, uint64_t area_bytes,
                                          const char* model, sluice_sequence* sequence) {
  return capi::guarded([&] {
    Engine& of = capi::engine_of(engine);
    capi::require_pointer(area, "area");
    capi::require_pointer(sequence, "sequence");
    *sequence = of.resume(std::span(static_cast<const std::byte*>(area), area_bytes), text_of(model)).value;
  });
}

sluice_status sluice_engine_resume_file(sluice_engine* engine, const char* path, const char* model,
                                        sluice_sequence* sequence) {
  return capi::guarded([&] {
    Engine& of = capi::engine_of(engine);
    capi::require_pointer(path, "path");
    capi::require_pointer(sequence, "sequence");
    *sequence = of.resume(path, text_of(model)).value;
  });
}
