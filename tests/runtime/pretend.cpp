// A model of one rule, for tests of the runtime: what follows depends on every token before it,
// through a ring of four and through pages, so a wrong slot, page or position changes the text.
#include <cstdint>

extern "C" {

struct Engine {
  void* buffers[64];
};

int32_t engine_abi() { return 1; }

void* engine_create(void* const* buffers, int32_t count, int32_t threads) {
  if (threads > 64) return nullptr;
  auto* engine = new Engine;
  for (int i = 0; i < count; ++i) engine->buffers[i] = buffers[i];
  return engine;
}

void engine_destroy(void* engine) { delete static_cast<Engine*>(engine); }

static uint32_t mix(uint32_t h, uint32_t x) {
  h = (h ^ x) * 0x9E3779B1u;
  return h ^ (h >> 15);
}

static void remember(void* const* b, int32_t rows) {
  auto* token = static_cast<int32_t*>(b[0]);
  auto* position = static_cast<int32_t*>(b[1]);
  auto* slot = static_cast<int32_t*>(b[2]);
  auto* pages_of = static_cast<int32_t*>(b[4]);
  auto* ring = static_cast<int32_t*>(b[12]);
  auto* pages = static_cast<int32_t*>(b[13]);
  auto* mixed = static_cast<uint32_t*>(b[15]);
  for (int r = 0; r < rows; ++r) {
    const int32_t p = position[r], s = slot[r];
    ring[s * 4 + p % 4] = token[r];
    pages[pages_of[s * 4 + p / 16] * 16 + p % 16] = token[r];
    uint32_t h = 1;
    for (int q = 0; q <= p; ++q) h = mix(h, pages[pages_of[s * 4 + q / 16] * 16 + q % 16]);
    for (int q = p < 3 ? 0 : p - 3; q <= p; ++q) h = mix(h, ring[s * 4 + q % 4]);
    mixed[r] = h;
  }
}

static void scale(void* const* b, int32_t rows) {
  auto* mixed = static_cast<uint32_t*>(b[15]);
  auto* hidden = static_cast<uint32_t*>(b[9]);
  auto* weight = static_cast<uint32_t*>(b[14]);
  for (int r = 0; r < rows; ++r) hidden[r] = mixed[r] * weight[0];
}

static void sample(void* const* b, int32_t rows) {
  auto* row = static_cast<int32_t*>(b[5]);
  auto* temperature = static_cast<float*>(b[6]);
  auto* seed = static_cast<uint64_t*>(b[7]);
  auto* position = static_cast<int64_t*>(b[8]);
  auto* hidden = static_cast<uint32_t*>(b[9]);
  auto* top_p = static_cast<float*>(b[16]);
  auto* top_k = static_cast<int32_t*>(b[17]);
  auto* min_p = static_cast<float*>(b[18]);
  auto* top_count = static_cast<int32_t*>(b[19]);
  auto* masked = static_cast<int32_t*>(b[22]);
  auto* allowed = static_cast<uint32_t*>(b[23]);
  auto* biased = static_cast<int32_t*>(b[24]);
  auto* bias_token = static_cast<int32_t*>(b[25]);
  auto* bias = static_cast<float*>(b[26]);
  auto* counted = static_cast<int32_t*>(b[27]);
  auto* counts = static_cast<uint32_t*>(b[28]);
  auto* shortlist = static_cast<int32_t*>(b[32]);
  auto* forced = static_cast<int32_t*>(b[33]);
  auto* summed = static_cast<int32_t*>(b[34]);
  for (int r = 0; r < rows; ++r) {
    uint32_t h = hidden[row[r]];
    for (int i = 0; i < biased[r]; ++i) {
      h = mix(mix(h, bias_token[r * 300 + i]), int32_t(bias[r * 300 + i] * 1024));
    }
    if (counted[r]) {
      for (int i = 0; i < 256; ++i) h = mix(h, counts[counted[r] * 256 + i]);
      for (int i = 29; i < 32; ++i) h = mix(h, int32_t(static_cast<float*>(b[i])[r] * 1024));
    }
    if (shortlist[r]) h = mix(h, shortlist[r]);
    if (temperature[r] > 0) {
      h = mix(mix(h, seed[r]), mix(seed[r] >> 32, position[r]));
      h = mix(mix(mix(h, uint32_t(top_p[r] * 1024)), top_k[r]), uint32_t(min_p[r] * 1024));
    }
    int32_t token = 1 + h % 255;
    // The next allowed token; a mask that allows nothing must never come this far.
    while (masked[r] && !(allowed[r * 8 + token / 32] >> token % 32 & 1)) token = (token + 1) % 256;
    const float logprob = -static_cast<float>(h % 7);
    if (forced[r]) token = forced[r] - 1;
    if (summed[r]) static_cast<float*>(b[35])[r] = float(h % 8) / 8;
    static_cast<int32_t*>(b[10])[r] = token;
    static_cast<float*>(b[11])[r] = logprob;
    for (int i = 0; i < 8 && i < top_count[r]; ++i) {
      static_cast<int32_t*>(b[20])[r * 8 + i] = (token + i) % 256;
      static_cast<float*>(b[21])[r * 8 + i] = i < 3 ? logprob - i : -__builtin_inff();
    }
  }
}

int32_t engine_run(void* engine, int32_t phase, int32_t rows, int32_t first, int32_t last) {
  void* const* b = static_cast<Engine*>(engine)->buffers;
  for (int step = first; step < last; ++step) {
    if (phase == 2) {
      sample(b, rows);
    } else if (step == 0) {
      remember(b, rows);
    } else {
      scale(b, rows);
    }
  }
  return 0;
}
}
