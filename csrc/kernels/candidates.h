// Tokens in canonical order, as runtime/sampling/filters.py has it: larger value first, lower id
// first among equals. Selecting and sorting of our own: kernels use no C++ library.
#pragma once

#include "kernels/simd.h"

namespace qs::QS_LEVEL {

struct Candidate {
  double value;
  int64_t id;
  int64_t weight;
};

QS_INLINE bool before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

QS_INLINE void swap(Candidate* list, int64_t i, int64_t j) {
  const Candidate kept = list[i];
  list[i] = list[j];
  list[j] = kept;
}

// Moves the elements before the pivot to the front; returns the pivot's place.
inline int64_t partition(Candidate* list, int64_t first, int64_t last) {
  swap(list, first + (last - first) / 2, last - 1);
  const Candidate pivot = list[last - 1];
  int64_t place = first;
  for (int64_t i = first; i < last - 1; ++i) {
    if (before(list[i], pivot)) swap(list, i, place++);
  }
  swap(list, place, last - 1);
  return place;
}

// The candidate at which the weights of the canonical order reach `target`, 0 < target <= their
// sum. It ends in its place, with those before it in front of it.
inline int64_t select(Candidate* list, int64_t count, int64_t target) {
  int64_t first = 0, last = count, reached = 0;
  while (last - first > 1) {
    const int64_t place = partition(list, first, last);
    int64_t front = 0;
    for (int64_t i = first; i < place; ++i) front += list[i].weight;
    if (reached + front >= target) {
      last = place;
    } else if (reached + front + list[place].weight >= target) {
      return place;
    } else {
      reached += front + list[place].weight;
      first = place + 1;
    }
  }
  return first;
}

// Heapsort into canonical order.
inline void sort(Candidate* list, int64_t count) {
  auto sift = [&](int64_t at, int64_t size) {
    for (int64_t child = 2 * at + 1; child < size; child = 2 * at + 1) {
      if (child + 1 < size && before(list[child], list[child + 1])) ++child;
      if (!before(list[at], list[child])) return;
      swap(list, at, child);
      at = child;
    }
  };
  for (int64_t at = count / 2 - 1; at >= 0; --at) sift(at, count);
  for (int64_t size = count - 1; size > 0; --size) {
    swap(list, 0, size);
    sift(0, size);
  }
}

}  // namespace qs::QS_LEVEL
