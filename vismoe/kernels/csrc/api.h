// What Python may call.

#pragma once

#define VISMOE_API extern "C" __attribute__((visibility("default")))
